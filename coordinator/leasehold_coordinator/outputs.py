"""A workload's output, fetched from its worker piece by piece."""

from collections.abc import AsyncIterator
from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.fleet_pb2 import ReadWorkloadOutputResponse
from leasehold.v1.worker_session_pb2 import ReadOutput
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.clock import duration
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import Fleet

WAIT_S: Final = 10.0
"""How long the worker waits for more, for somebody who follows."""

ANSWER_S: Final = 10.0
"""How long its answer may take beyond that."""


async def read_output(
    fleet: Fleet, workload: Workload, offset: int, *, follow: bool
) -> AsyncIterator[ReadWorkloadOutputResponse]:
    """The output from the offset on: what there is, or until the workload has ended.

    Raises:
        FleetError: OUTPUT_UNAVAILABLE, its worker is out of contact; or what the worker answers.
    """
    while True:
        session = fleet.sessions.get(workload.worker_id)
        if session is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE,
                f"the output of {workload.name} is on a worker out of contact: try again when it is back",
            )
        wait_s = WAIT_S if follow else 0.0
        request = ReadOutput(workload_id=workload.workload_id, offset=offset, wait=duration(wait_s))
        chunk = await session.read_output(request, wait_s + ANSWER_S)
        if chunk.HasField("error"):
            raise FleetError.from_proto(chunk.error)
        if chunk.data:
            offset += len(chunk.data)
            yield ReadWorkloadOutputResponse(data=chunk.data, next_offset=offset)
        if chunk.end or not (chunk.data or follow):
            return
