"""WorkloadService: workloads, their output, their checkpoints and operations on them."""

from collections.abc import AsyncIterator
from typing import TypeAlias, final

from leasehold.v1.command_pb2 import Command
from leasehold.v1.operation_pb2 import CheckpointOperation, Operation, ReleaseOperation
from leasehold.v1.watch_pb2 import Bookmark
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    AdoptProcessResponse,
    CheckpointWorkloadRequest,
    CheckpointWorkloadResponse,
    CreateWorkloadRequest,
    CreateWorkloadResponse,
    DeleteCheckpointsRequest,
    DeleteCheckpointsResponse,
    GetWorkloadRequest,
    GetWorkloadResponse,
    ListCheckpointsRequest,
    ListCheckpointsResponse,
    ListWorkloadsRequest,
    ListWorkloadsResponse,
    PlanRequest,
    PlanResponse,
    ReadWorkloadOutputRequest,
    ReadWorkloadOutputResponse,
    ReleaseHoldRequest,
    ReleaseHoldResponse,
    ReleaseWorkloadRequest,
    ReleaseWorkloadResponse,
    RemapWorkloadsRequest,
    RemapWorkloadsResponse,
    RestoreWorkloadRequest,
    RestoreWorkloadResponse,
    StopWorkloadRequest,
    StopWorkloadResponse,
    SuspendWorkerRequest,
    SuspendWorkerResponse,
    SuspendWorkloadRequest,
    SuspendWorkloadResponse,
    WatchWorkloadsRequest,
    WatchWorkloadsResponse,
)
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.commands.checkpoint_list import list_checkpoints
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.output import read_output
from leasehold_coordinator.commands.plans import Plans
from leasehold_coordinator.commands.request_keys import RequestKey
from leasehold_coordinator.core import list_fields, list_orders
from leasehold_coordinator.core.client_views import command_view
from leasehold_coordinator.core.paging import page_request
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet import Fleet

OperationRequest: TypeAlias = (
    SuspendWorkloadRequest
    | RestoreWorkloadRequest
    | RemapWorkloadsRequest
    | CheckpointWorkloadRequest
    | StopWorkloadRequest
    | ReleaseWorkloadRequest
)


@final
class WorkloadService(WorkloadServiceServicer):
    """Serves workloads from memory and store, checkpoints from the workers, and creates commands."""

    def __init__(self, fleet: Fleet, requests: CommandCreation, plans: Plans) -> None:
        self.fleet = fleet
        self._requests = requests
        self._plans = plans

    async def CreateWorkload(
        self, request: CreateWorkloadRequest, context: Context
    ) -> CreateWorkloadResponse:
        workload, command = await self._requests.create_workload(request)
        return CreateWorkloadResponse(
            workload=self.fleet.view(workload), command=command and command_view(command)
        )

    async def GetWorkload(self, request: GetWorkloadRequest, context: Context) -> GetWorkloadResponse:
        return GetWorkloadResponse(workload=self.fleet.view(await self.fleet.find_workload(request.workload)))

    async def ListWorkloads(self, request: ListWorkloadsRequest, context: Context) -> ListWorkloadsResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.WORKLOADS)
        worker_id = self.fleet.registry.find(request.worker).hello.worker_id if request.worker else None
        asked = page_request(request, list_orders.WORKLOADS.parse(request.order_by), worker_id or "")
        page = await self.fleet.store.list_workloads(
            asked, wanted, include_ended=request.include_ended, worker_id=worker_id
        )
        return ListWorkloadsResponse(
            workloads=map(self.fleet.view, page.items), next_page_token=asked.token(page.last)
        )

    async def WatchWorkloads(
        self, request: WatchWorkloadsRequest, context: Context
    ) -> AsyncIterator[WatchWorkloadsResponse]:
        hub = self.fleet.workload_hub
        # Subscribes by id, since the name may pass to another workload during the watch.
        wanted = await self.fleet.find_workload(request.workload) if request.workload else None
        key = wanted.workload_id if wanted is not None else None
        with hub.subscribe(key) as subscription:
            token = hub.token(hub.revision)
            if request.resume_token:
                for change in hub.since(request.resume_token):
                    if key in (None, change.key):
                        yield WatchWorkloadsResponse(
                            workload=change.message, resume_token=hub.token(change.revision)
                        )
            else:
                shown = list(self.fleet.workloads.values())
                if key is not None:
                    shown = [await self.fleet.find_workload(key)]
                for workload in shown:
                    yield WatchWorkloadsResponse(workload=self.fleet.view(workload), resume_token=token)
                yield WatchWorkloadsResponse(bookmark=Bookmark(snapshot_end=True), resume_token=token)
            async for next_change in subscription.changes():
                if next_change is None:
                    yield WatchWorkloadsResponse(bookmark=Bookmark(), resume_token=token)
                else:
                    token = hub.token(next_change.revision)
                    yield WatchWorkloadsResponse(workload=next_change.message, resume_token=token)

    async def SuspendWorkload(
        self, request: SuspendWorkloadRequest, context: Context
    ) -> SuspendWorkloadResponse:
        operation = Operation(suspend=request.operation)
        return SuspendWorkloadResponse(command=await self._operate(request, operation, request.workload))

    async def SuspendWorker(self, request: SuspendWorkerRequest, context: Context) -> SuspendWorkerResponse:
        return await self._requests.suspend_worker(request)

    async def RestoreWorkload(
        self, request: RestoreWorkloadRequest, context: Context
    ) -> RestoreWorkloadResponse:
        operation = Operation(restore=request.operation)
        return RestoreWorkloadResponse(command=await self._operate(request, operation, request.workload))

    async def RemapWorkloads(
        self, request: RemapWorkloadsRequest, context: Context
    ) -> RemapWorkloadsResponse:
        operation = Operation(remap=request.operation)
        return RemapWorkloadsResponse(command=await self._operate(request, operation))

    async def CheckpointWorkload(
        self, request: CheckpointWorkloadRequest, context: Context
    ) -> CheckpointWorkloadResponse:
        operation = Operation(checkpoint=CheckpointOperation())
        return CheckpointWorkloadResponse(command=await self._operate(request, operation, request.workload))

    async def ListCheckpoints(
        self, request: ListCheckpointsRequest, context: Context
    ) -> ListCheckpointsResponse:
        return await list_checkpoints(self.fleet, request)

    async def DeleteCheckpoints(
        self, request: DeleteCheckpointsRequest, context: Context
    ) -> DeleteCheckpointsResponse:
        operation = Operation(delete_checkpoints=request.operation)
        return DeleteCheckpointsResponse(command=await self._requests.operate_worker(request, operation))

    async def ReleaseHold(self, request: ReleaseHoldRequest, context: Context) -> ReleaseHoldResponse:
        return ReleaseHoldResponse(command=await self._requests.release_hold(request))

    async def StopWorkload(self, request: StopWorkloadRequest, context: Context) -> StopWorkloadResponse:
        operation = Operation(stop=request.operation)
        return StopWorkloadResponse(command=await self._operate(request, operation, request.workload))

    async def AdoptProcess(self, request: AdoptProcessRequest, context: Context) -> AdoptProcessResponse:
        workload, command = await self._requests.adopt(request)
        if command is None:
            return AdoptProcessResponse()
        return AdoptProcessResponse(workload=self.fleet.view(workload), command=command)

    async def ReleaseWorkload(
        self, request: ReleaseWorkloadRequest, context: Context
    ) -> ReleaseWorkloadResponse:
        operation = Operation(release=ReleaseOperation())
        return ReleaseWorkloadResponse(command=await self._operate(request, operation, request.workload))

    async def Plan(self, request: PlanRequest, context: Context) -> PlanResponse:
        generation = request.expected_generation if request.HasField("expected_generation") else None
        kind = request.WhichOneof("operation")
        operation = Operation(**{kind: getattr(request, kind)}) if kind else Operation()
        return PlanResponse(plan=await self._plans.plan(request.workload, operation, generation))

    async def _operate(
        self, request: OperationRequest, operation: Operation, workload: str = ""
    ) -> Command | None:
        """Creates the requested command. None: the request asked only for validation, which succeeded."""
        generation = request.expected_generation if request.HasField("expected_generation") else None
        timeout = request.timeout if request.HasField("timeout") else None
        if not isinstance(request, StopWorkloadRequest | ReleaseWorkloadRequest) and request.validate_only:
            await self._plans.validate(
                workload=workload, operation=operation, expected_generation=generation, timeout=timeout
            )
            return None
        return await self._requests.operate(
            key=RequestKey.of(request.request_id, request),
            workload=workload,
            operation=operation,
            expected_generation=generation,
            timeout=timeout,
        )

    async def ReadWorkloadOutput(
        self, request: ReadWorkloadOutputRequest, context: Context
    ) -> AsyncIterator[ReadWorkloadOutputResponse]:
        workload = await self.fleet.find_workload(request.workload)
        async for piece in read_output(self.fleet, workload, request.offset, follow=request.follow):
            yield piece
