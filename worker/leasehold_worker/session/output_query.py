"""Answers to reads of a workload's output."""

from typing import Final

import trio
from leasehold.v1 import errors_pb2
from leasehold.worker.v1.session_pb2 import OutputChunk, ReadOutput

from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.files.workload_files import read_kept
from leasehold_worker.threads import run_in_thread
from leasehold_worker.timestamps import seconds
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED
from leasehold_worker.workloads.workload import EXEC, RUN, Workload

CHUNK_LIMIT_BYTES: Final = 65_536
"""Bytes of one answer, well below the limit of a frame."""

OFFSET_LIMIT: Final = 2**62
"""Larger than any file, and an offset that lseek(2) accepts."""

WAIT_LIMIT_S: Final = 30.0
POLL_INTERVAL_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0
"""Longest pause between two checks of a file without new bytes. The pause begins short and doubles."""

READ_TIMEOUT_S: Final = 10.0
"""Timeout of a read from disk."""

READS_AT_ONCE: Final = 8
_reads: Final = trio.CapacityLimiter(READS_AT_ONCE)
"""Reading threads, including those that hang on a disk."""


async def read_output(workloads: Workloads, request: ReadOutput) -> OutputChunk:
    """The answer to a read. It waits for more bytes as long as the request asks, and never longer than 30 s.

    Raises:
        OperationError: UNKNOWN_WORKLOAD, INVALID_ARGUMENT for an offset beyond any file, or
            OUTPUT_UNAVAILABLE.
    """
    workload = workloads.get(request.workload_id)
    if not -OFFSET_LIMIT <= request.offset <= OFFSET_LIMIT:
        raise invalid(
            "offset", f"offset {request.offset} is out of range: give {-OFFSET_LIMIT} to {OFFSET_LIMIT}"
        )
    if request.limit_bytes < 0:
        raise invalid("limit_bytes", f"limit_bytes {request.limit_bytes} is negative: give 0 or more")
    try:
        offset, data, end = await _next_bytes(workload, request, min(seconds(request.wait), WAIT_LIMIT_S))
    except FileNotFoundError as error:
        refusal = _unavailable(workload, "no file") if workload.origin == RUN else _elsewhere(workload)
        raise refusal from error
    except OSError as error:
        raise _unavailable(workload, error.strerror or "disk error") from error
    chunk = OutputChunk(read_id=request.read_id, data=data, end=end)
    if offset > request.offset and data:
        chunk.offset = offset
    return chunk


async def _next_bytes(workload: Workload, request: ReadOutput, wait_s: float) -> tuple[int, bytes, bool]:
    limit_bytes = min(request.limit_bytes or CHUNK_LIMIT_BYTES, CHUNK_LIMIT_BYTES)
    deadline = trio.current_time() + wait_s
    pause_s = POLL_INTERVAL_S
    while True:
        # Checked before the read: an ended workload writes nothing more, so the read sees all.
        ended = workload.state in ENDED
        offset, data = await _read(workload, request.offset, limit_bytes)
        left_s = deadline - trio.current_time()
        if data or ended or left_s <= 0:
            return offset, data, ended and len(data) < limit_bytes
        await trio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _read(workload: Workload, offset: int, limit_bytes: int) -> tuple[int, bytes]:
    with trio.move_on_after(READ_TIMEOUT_S):
        return await run_in_thread(
            read_kept, workload.output_path, limit_bytes, offset, abandon_on_cancel=True, limiter=_reads
        )
    raise _unavailable(workload, f"the disk did not answer within {READ_TIMEOUT_S:g} s")


def _elsewhere(workload: Workload) -> OperationError:
    """The refusal for a program that the worker did not start."""
    return OperationError(
        errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE,
        f"workload {workload.name} has no output here: it was not started by `leasehold run`, and writes "
        f"where its own caller reads{', such as the terminal' if workload.origin == EXEC else ''}",
    )


def _unavailable(workload: Workload, why: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE,
        f"the output of workload {workload.name} can't be read ({why}): check "
        f"{workload.output_path} on the worker's host",
    )
