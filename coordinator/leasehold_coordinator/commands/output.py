"""Reads a workload's output from its worker in chunks."""

from collections.abc import AsyncIterator
from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import ReadWorkloadOutputResponse
from leasehold.worker.v1.session_pb2 import ReadOutput

from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.session import FOLLOW_PLACES
from leasehold_coordinator.timestamps import duration

WAIT_S: Final = 10.0
"""How long the worker waits for more output on behalf of a follower."""

ROUND_S: Final = 2.0
"""The time in which every follower gets a turn if followers outnumber places."""

ANSWER_S: Final = 10.0
"""How long the worker's answer may take after the wait for bytes."""

READ_BYTES: Final = 16_384
"""The size of a chunk for the only reader of a worker's output."""

SHARED_BYTES: Final = 4_096
"""The size of a chunk for each of several readers of one worker's output.

All places together have less than 80 KB in flight: a link of 20 KB/s must carry answers to pings within 5 s.
"""

FROM_END_MINOR: Final = 9
"""The first minor version of the protocol whose workers read from the end of an output."""

OFFSET_LIMIT: Final = 2**62
"""The first invalid offset. No file is so large, and an answer's length can be added without overflow."""


async def read_output(
    fleet: FleetReader, workload: Workload, offset: int, *, follow: bool
) -> AsyncIterator[ReadWorkloadOutputResponse]:
    """The output from an offset on: the present output, or with ``follow`` until the workload has ended.

    A negative offset counts from the end.

    Raises:
        FleetError: INVALID_ARGUMENT, the offset is out of range. WORKER_UNAVAILABLE, the worker is out of
            contact. WRONG_STATE, the program was never started. Or the worker's own error.
    """
    if not -OFFSET_LIMIT < offset < OFFSET_LIMIT:
        raise invalid(
            "offset",
            f"offset {offset} is out of range: give more than {-OFFSET_LIMIT} and less than {OFFSET_LIMIT}",
        )
    readers = fleet.output_readers
    readers[workload.worker_id] += 1
    try:
        while True:
            session = fleet.sessions.get(workload.worker_id)
            if session is None:
                if _is_never_started(workload):
                    raise _no_output(workload)
                remedy = "is out of contact: read its output once it is connected"
                if fleet.registry.get(workload.worker_id) is None:
                    remedy = "was deleted, and has its output: read the output once the worker has returned"
                raise FleetError(
                    errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE, f"the worker of {workload.name} {remedy}"
                )
            wait_s = _wait_s(readers[workload.worker_id]) if follow else 0.0
            if session.hello.protocol_version.minor < FROM_END_MINOR:
                offset = max(0, offset)
            request = ReadOutput(
                workload_id=workload.workload_id,
                offset=offset,
                limit_bytes=READ_BYTES if readers[workload.worker_id] == 1 else SHARED_BYTES,
                wait=duration(wait_s),
            )
            chunk = await session.read_output(request, wait_s + ANSWER_S, follow=follow)
            if chunk.HasField("error"):
                raise _refusal(workload, chunk.error)
            if chunk.data:
                begin = max(offset, chunk.offset) if chunk.HasField("offset") else offset
                offset = begin + len(chunk.data)
                if begin < 0 or offset > OFFSET_LIMIT:
                    raise FleetError(
                        errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
                        f"the worker of {workload.name} sent output of the impossible offset {begin}: "
                        "update the worker",
                    )
                yield ReadWorkloadOutputResponse(data=chunk.data, next_offset=offset)
            if chunk.end or not (chunk.data or follow):
                return
    finally:
        readers[workload.worker_id] -= 1
        if not readers[workload.worker_id]:
            del readers[workload.worker_id]


def _refusal(workload: Workload, error: errors_pb2.Error) -> FleetError:
    """The worker's error. A worker knows nothing of a workload whose program it has not started."""
    if error.reason != errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD or workload.status.HasField("start_time"):
        return FleetError.from_proto(error)
    return _no_output(workload)


def _is_never_started(workload: Workload) -> bool:
    return workload.status.HasField("end_time") and not workload.status.HasField("start_time")


def _no_output(workload: Workload) -> FleetError:
    """The refusal of output of a program that was not started, or not yet."""
    status = workload.status
    if not status.HasField("end_time"):
        why = "the program has not started yet: read the output once it has"
    elif status.HasField("error"):
        why = f"the program was never started: {status.error.message}"
    else:
        why = "the program was never started: `leasehold get commands` shows why"
    return FleetError(errors_pb2.ERROR_REASON_WRONG_STATE, f"{workload.name} has no output, because {why}")


def _wait_s(readers: int) -> float:
    """How long a follower may hold its place while it waits for more output."""
    return WAIT_S if readers <= FOLLOW_PLACES else ROUND_S * FOLLOW_PLACES / readers
