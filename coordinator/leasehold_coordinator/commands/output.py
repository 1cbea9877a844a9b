"""A workload's output, fetched from its worker piece by piece."""

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
"""How long the worker waits for more, for somebody who follows."""

ROUND_S: Final = 2.0
"""Within which time each follower has its turn where there are more of them than places."""

ANSWER_S: Final = 10.0
"""How long its answer may take beyond that."""

READ_BYTES: Final = 16_384
"""What one reader is sent at once."""

SHARED_BYTES: Final = 4_096
"""What each of several readers of one worker's output is sent at once.

All places together have less than 80 KB under way: a link of 20 KB/s must carry answers to pings within 5 s.
"""

OFFSET_LIMIT: Final = 2**62
"""Offset that no file reaches, and to which the length of an answer can be added."""


async def read_output(
    fleet: FleetReader, workload: Workload, offset: int, *, follow: bool
) -> AsyncIterator[ReadWorkloadOutputResponse]:
    """The output from the offset on: what there is, or until the workload has ended.

    Raises:
        FleetError: INVALID_ARGUMENT, no output has the offset; OUTPUT_UNAVAILABLE, its worker is out of
            contact; or what the worker answers.
    """
    if offset >= OFFSET_LIMIT:
        raise invalid("offset", f"offset {offset} is out of range: give less than {OFFSET_LIMIT}")
    readers = fleet.output_readers
    readers[workload.worker_id] += 1
    try:
        while True:
            session = fleet.sessions.get(workload.worker_id)
            if session is None:
                raise FleetError(
                    errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE,
                    f"the output of {workload.name} is on a worker out of contact: try again when it is back",
                )
            wait_s = _wait_s(readers[workload.worker_id]) if follow else 0.0
            request = ReadOutput(
                workload_id=workload.workload_id,
                offset=offset,
                limit_bytes=READ_BYTES if readers[workload.worker_id] == 1 else SHARED_BYTES,
                wait=duration(wait_s),
            )
            chunk = await session.read_output(request, wait_s + ANSWER_S, follow=follow)
            if chunk.HasField("error"):
                raise FleetError.from_proto(chunk.error)
            if chunk.data:
                begin = max(offset, chunk.offset) if chunk.HasField("offset") else offset
                offset = begin + len(chunk.data)
                if offset > OFFSET_LIMIT:
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


def _wait_s(readers: int) -> float:
    """How long a follower may hold its place where it waits for more output."""
    return WAIT_S if readers <= FOLLOW_PLACES else ROUND_S * FOLLOW_PLACES / readers
