"""WorkloadService: workloads, their output, their checkpoints and operations on them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TypeAlias, final

from leasehold.v1.command_pb2 import Command
from leasehold.v1.operation_pb2 import CheckpointOperation, Operation, ReleaseHoldOperation, ReleaseOperation
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    AdoptProcessResponse,
    CheckpointWorkloadRequest,
    CheckpointWorkloadResponse,
    CreateWorkloadRequest,
    CreateWorkloadResponse,
    DeleteCheckpointsRequest,
    DeleteCheckpointsResponse,
    DeleteWorkloadRequest,
    DeleteWorkloadResponse,
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
    UpdateWorkloadRequest,
    UpdateWorkloadResponse,
    WatchWorkloadsRequest,
    WatchWorkloadsResponse,
)
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.watch_stream import watch
from leasehold_coordinator.commands.checkpoint_list import list_checkpoints
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.output import read_output
from leasehold_coordinator.commands.plans import Plans
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.core.client_views import command_view
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.permissions import current_views, require_own
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.filters import matches
from leasehold_coordinator.lists.pages import page_request

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

    def __init__(
        self, fleet: FleetReader, requests: CommandCreation, records: RecordChanges, plans: Plans
    ) -> None:
        self.fleet = fleet
        self._requests = requests
        self._records = records
        self._plans = plans

    async def CreateWorkload(
        self, request: CreateWorkloadRequest, context: Context
    ) -> CreateWorkloadResponse:
        workload, command = await self._requests.create_workload(request)
        return CreateWorkloadResponse(
            workload=self._seen(workload), command=command and current_views().command(command_view(command))
        )

    def _seen(self, workload: Workload) -> Workload:
        """A workload as the caller sees it."""
        return current_views().workload(self.fleet.view(workload))

    async def GetWorkload(self, request: GetWorkloadRequest, context: Context) -> GetWorkloadResponse:
        found = await self.fleet.find_stored_workload(request.workload)
        return GetWorkloadResponse(workload=self._seen(found))

    async def ListWorkloads(self, request: ListWorkloadsRequest, context: Context) -> ListWorkloadsResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.WORKLOADS)
        worker_id = self.fleet.registry.find(request.worker).hello.worker_id if request.worker else None
        asked = page_request(request, list_orders.WORKLOADS.parse(request.order_by), worker_id or "")
        page = await self.fleet.store.lists.workloads(
            asked,
            wanted,
            current_views().workload,
            include_ended=request.include_ended,
            worker_id=worker_id,
        )
        return ListWorkloadsResponse(
            workloads=map(self._seen, page.items), next_page_token=asked.token(page.last)
        )

    async def WatchWorkloads(
        self, request: WatchWorkloadsRequest, context: Context
    ) -> AsyncIterator[WatchWorkloadsResponse]:
        matching = await read_filter(self.fleet, request.filter, list_fields.WORKLOADS)
        views = current_views()

        def view(response: WatchWorkloadsResponse) -> WatchWorkloadsResponse:
            if views.are_whole or not response.HasField("workload"):
                return response
            return WatchWorkloadsResponse(workload=views.workload(response.workload))

        def shown(response: WatchWorkloadsResponse) -> WatchWorkloadsResponse:
            if response.HasField("workload") and not matches(matching, response.workload):
                return WatchWorkloadsResponse(deleted_workload_id=response.workload.workload_id)
            return response

        # By id, since the name may pass to another workload during the watch.
        wanted = await self._find_current(request.workload) if request.workload else None
        responses = watch(
            self.fleet.workload_hub,
            WatchWorkloadsResponse,
            request.resume_token,
            self._snapshot(wanted),
            key=wanted.workload_id if wanted is not None else None,
            scope=views.scope,
            view=view,
            shown=shown,
        )
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def _find_current(self, id_or_name: str) -> Workload:
        """A workload as it is on disk, of which no change was published since the store was read.

        Raises:
            FleetError: UNKNOWN_WORKLOAD or STORAGE_UNAVAILABLE.
        """
        hub = self.fleet.workload_hub
        while True:
            revision = hub.revision
            found = await self.fleet.find_stored_workload(id_or_name)
            if not hub.has_changed(found.workload_id, revision):
                return found

    def _snapshot(self, wanted: Workload | None) -> Iterator[list[tuple[str, WatchWorkloadsResponse]]]:
        """The workloads that have not ended, or the wanted workload, in their stored states."""
        workloads = self.fleet.workloads
        for workload_id in workloads.ids_on_disk() if wanted is None else [wanted.workload_id]:
            workload = workloads.on_disk(workload_id) or wanted
            if workload is not None:
                yield [(workload_id, WatchWorkloadsResponse(workload=self.fleet.view(workload)))]

    async def UpdateWorkload(
        self, request: UpdateWorkloadRequest, context: Context
    ) -> UpdateWorkloadResponse:
        workload = await self._records.update_workload(request)
        return UpdateWorkloadResponse(workload=self.fleet.view(workload))

    async def DeleteWorkload(
        self, request: DeleteWorkloadRequest, context: Context
    ) -> DeleteWorkloadResponse:
        return await self._records.delete_workload(request)

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
        command = await self._requests.operate_worker(request, operation)
        return DeleteCheckpointsResponse(command=command)

    async def ReleaseHold(self, request: ReleaseHoldRequest, context: Context) -> ReleaseHoldResponse:
        operation = Operation(release_hold=ReleaseHoldOperation(hold_id=request.hold_id))
        command = await self._requests.operate_worker(request, operation)
        return ReleaseHoldResponse(command=command)

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
        command = await self._requests.operate(
            key=self._requests.key(request.request_id, request),
            workload=workload,
            operation=operation,
            expected_generation=generation,
            timeout=timeout,
        )
        return current_views().command(command)

    async def ReadWorkloadOutput(
        self, request: ReadWorkloadOutputRequest, context: Context
    ) -> AsyncIterator[ReadWorkloadOutputResponse]:
        workload = await self.fleet.find_workload(request.workload)
        require_own([workload])
        async for piece in read_output(self.fleet, workload, request.offset, follow=request.follow):
            yield piece
