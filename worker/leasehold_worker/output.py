"""Pieces of a workload's output, for whoever follows it."""

from pathlib import Path
from typing import Final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.worker_session_pb2 import OutputChunk, ReadOutput

from leasehold_worker.errors import OperationError
from leasehold_worker.workload import ENDED, Workload
from leasehold_worker.workloads import Workloads

CHUNK_LIMIT_BYTES: Final = 65_536
"""Well below the limit of a frame."""

WAIT_LIMIT_S: Final = 30.0
POLL_INTERVAL_S: Final = 0.1


async def read_output(workloads: Workloads, request: ReadOutput) -> OutputChunk:
    """The answer to a read. It waits for more as long as the request says, and never longer than 30 s."""
    try:
        workload = workloads.get(request.workload_id)
        wait_s = min(request.wait.ToTimedelta().total_seconds(), WAIT_LIMIT_S)
        data, end = await _next_bytes(workload, request, wait_s)
    except OperationError as error:
        return OutputChunk(read_id=request.read_id, error=error.to_proto())
    except OSError as error:
        refusal = OperationError(
            errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE,
            f"the output of workload {request.workload_id} can't be read: {error.strerror}",
        )
        return OutputChunk(read_id=request.read_id, error=refusal.to_proto())
    return OutputChunk(read_id=request.read_id, data=data, end=end)


async def _next_bytes(workload: Workload, request: ReadOutput, wait_s: float) -> tuple[bytes, bool]:
    limit_bytes = min(request.limit_bytes or CHUNK_LIMIT_BYTES, CHUNK_LIMIT_BYTES)
    deadline = trio.current_time() + wait_s
    while True:
        # Asked before reading: what an ended workload has written is all there.
        ended = workload.state in ENDED
        data = await trio.to_thread.run_sync(_read, workload.output_path, request.offset, limit_bytes)
        if data or ended or trio.current_time() >= deadline:
            return data, ended and len(data) < limit_bytes
        await trio.sleep(POLL_INTERVAL_S)


def _read(path: Path, offset: int, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(limit_bytes)
