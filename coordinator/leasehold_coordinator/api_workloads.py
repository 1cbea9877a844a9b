"""WorkloadService: the workloads, and what can be done with them."""

from collections.abc import AsyncIterator
from typing import final

from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Operation
from leasehold.v1.fleet_pb2 import (
    Bookmark,
    CreateWorkloadRequest,
    CreateWorkloadResponse,
    GetWorkloadRequest,
    GetWorkloadResponse,
    ListWorkloadsRequest,
    ListWorkloadsResponse,
    ReadWorkloadOutputRequest,
    ReadWorkloadOutputResponse,
    RemapWorkloadsRequest,
    RemapWorkloadsResponse,
    RestoreWorkloadRequest,
    RestoreWorkloadResponse,
    StopWorkloadRequest,
    StopWorkloadResponse,
    SuspendWorkloadRequest,
    SuspendWorkloadResponse,
    WatchWorkloadsRequest,
    WatchWorkloadsResponse,
)
from leasehold.v1.fleet_pb2_grpc import WorkloadServiceServicer

from leasehold_coordinator.api_errors import Context, streaming, unary
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet import Fleet
from leasehold_coordinator.outputs import read_output
from leasehold_coordinator.paging import next_token, page_of
from leasehold_coordinator.requests import Requests


@final
class WorkloadService(WorkloadServiceServicer):
    """Serves workloads from memory and store, and creates commands for them."""

    def __init__(self, fleet: Fleet, requests: Requests) -> None:
        self._fleet = fleet
        self._requests = requests

    @unary
    async def CreateWorkload(
        self, request: CreateWorkloadRequest, context: Context
    ) -> CreateWorkloadResponse:
        workload, command = await self._requests.create_workload(request)
        return CreateWorkloadResponse(workload=workload, command=command)

    @unary
    async def GetWorkload(self, request: GetWorkloadRequest, context: Context) -> GetWorkloadResponse:
        return GetWorkloadResponse(workload=await self._fleet.find_workload(request.workload))

    @unary
    async def ListWorkloads(self, request: ListWorkloadsRequest, context: Context) -> ListWorkloadsResponse:
        offset, size = page_of(request.page_size, request.page_token)
        worker_id = self._fleet.registry.find(request.worker).hello.worker_id if request.worker else None
        found = await self._fleet.store.list_workloads(
            include_ended=request.include_ended, worker_id=worker_id, offset=offset, limit=size + 1
        )
        return ListWorkloadsResponse(
            workloads=found[:size], next_page_token=next_token(offset, size, len(found))
        )

    @streaming
    async def WatchWorkloads(
        self, request: WatchWorkloadsRequest, context: Context
    ) -> AsyncIterator[WatchWorkloadsResponse]:
        hub = self._fleet.workload_hub
        with hub.subscribe() as subscription:
            token = hub.token(hub.revision)
            if request.resume_token:
                for change in hub.since(request.resume_token):
                    yield WatchWorkloadsResponse(
                        workload=change.message, resume_token=hub.token(change.revision)
                    )
            else:
                for workload in list(self._fleet.workloads.values()):
                    yield WatchWorkloadsResponse(workload=workload, resume_token=token)
                yield WatchWorkloadsResponse(bookmark=Bookmark(snapshot_end=True), resume_token=token)
            async for next_change in subscription.changes():
                if next_change is None:
                    yield WatchWorkloadsResponse(bookmark=Bookmark(), resume_token=token)
                else:
                    token = hub.token(next_change.revision)
                    yield WatchWorkloadsResponse(workload=next_change.message, resume_token=token)

    @unary
    async def SuspendWorkload(
        self, request: SuspendWorkloadRequest, context: Context
    ) -> SuspendWorkloadResponse:
        command = await self._requests.operate(
            request_id=request.request_id,
            workload=request.workload,
            operation=Operation(suspend=request.operation),
            expected_generation=_generation(request),
            timeout=request.timeout if request.HasField("timeout") else None,
            validate_only=request.validate_only,
        )
        return SuspendWorkloadResponse(command=command)

    @unary
    async def RestoreWorkload(
        self, request: RestoreWorkloadRequest, context: Context
    ) -> RestoreWorkloadResponse:
        command = await self._requests.operate(
            request_id=request.request_id,
            workload=request.workload,
            operation=Operation(restore=request.operation),
            expected_generation=_generation(request),
            timeout=request.timeout if request.HasField("timeout") else None,
            validate_only=request.validate_only,
        )
        return RestoreWorkloadResponse(command=command)

    @unary
    async def RemapWorkloads(
        self, request: RemapWorkloadsRequest, context: Context
    ) -> RemapWorkloadsResponse:
        moves = request.operation.moves
        if len(moves) != 1:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                f"{len(moves)} workloads can't be moved by one command yet: move one at a time",
                field="operation.moves",
            )
        if not moves[0].pairs:
            raise invalid("operation.moves.pairs", "a move needs at least one pair: name OLD and NEW")
        workload = await self._fleet.find_workload(moves[0].workload_id)
        operation = Operation(remap=request.operation)
        operation.remap.moves[0].workload_id = workload.workload_id
        command = await self._requests.operate(
            request_id=request.request_id,
            workload=workload.workload_id,
            operation=operation,
            expected_generation=_generation(request),
            timeout=request.timeout if request.HasField("timeout") else None,
            validate_only=request.validate_only,
        )
        return RemapWorkloadsResponse(command=command)

    @unary
    async def StopWorkload(self, request: StopWorkloadRequest, context: Context) -> StopWorkloadResponse:
        command = await self._requests.operate(
            request_id=request.request_id,
            workload=request.workload,
            operation=Operation(stop=request.operation),
            expected_generation=_generation(request),
            timeout=request.timeout if request.HasField("timeout") else None,
        )
        return StopWorkloadResponse(command=command)

    @streaming
    async def ReadWorkloadOutput(
        self, request: ReadWorkloadOutputRequest, context: Context
    ) -> AsyncIterator[ReadWorkloadOutputResponse]:
        workload = await self._fleet.find_workload(request.workload)
        async for piece in read_output(self._fleet, workload, request.offset, follow=request.follow):
            yield piece


def _generation(
    request: SuspendWorkloadRequest | RestoreWorkloadRequest | RemapWorkloadsRequest | StopWorkloadRequest,
) -> int | None:
    return request.expected_generation if request.HasField("expected_generation") else None
