"""FleetService: the workers and their GPUs."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import final

from leasehold.v1 import errors_pb2
from leasehold.v1.fleet_service_pb2 import (
    CordonRequest,
    CordonResponse,
    DeleteWorkerRequest,
    DeleteWorkerResponse,
    GetGpuRequest,
    GetGpuResponse,
    GetWorkerRequest,
    GetWorkerResponse,
    ListGpusRequest,
    ListGpusResponse,
    ListWorkersRequest,
    ListWorkersResponse,
    ResetGpuHealthRequest,
    ResetGpuHealthResponse,
    UncordonRequest,
    UncordonResponse,
    WatchFleetRequest,
    WatchFleetResponse,
)
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceServicer
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.worker_pb2 import FleetGpu

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.watch_stream import watch
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.filter_reader import read_filter, read_fleet_filter
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.memory_lists import MemoryLists
from leasehold_coordinator.fleet.permissions import current_views
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.filters import matches_fleet
from leasehold_coordinator.lists.pages import PAGE_LIMIT_BYTES, Position, page_request


@final
class FleetService(FleetServiceServicer):
    """Serves workers and GPUs from the registry, and creates commands about them."""

    def __init__(self, fleet: FleetReader, requests: CommandCreation, records: RecordChanges) -> None:
        self.fleet = fleet
        self._requests = requests
        self._records = records
        self._lists = MemoryLists()

    async def GetWorker(self, request: GetWorkerRequest, context: Context) -> GetWorkerResponse:
        known = self.fleet.registry.find(request.worker)
        return GetWorkerResponse(worker=self.fleet.worker(known))

    async def ListWorkers(self, request: ListWorkersRequest, context: Context) -> ListWorkersResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.WORKERS)
        asked = page_request(request, list_orders.WORKERS.parse(request.order_by))
        is_sorted = not request.order_by
        behind = _after(self.fleet.registry.all(), asked.after if is_sorted else None)
        page = await self._lists.page(map(self.fleet.worker, behind), asked, wanted, is_sorted=is_sorted)
        return ListWorkersResponse(workers=page.items, next_page_token=asked.token(page.last))

    async def GetGpu(self, request: GetGpuRequest, context: Context) -> GetGpuResponse:
        owner = self.fleet.registry.owner(request.uuid)
        for gpu in self.fleet.gpus(owner) if owner is not None else ():
            if gpu.gpu.uuid == request.uuid:
                return GetGpuResponse(gpu=current_views().gpu(gpu))
        raise FleetError(
            errors_pb2.ERROR_REASON_UNKNOWN_GPU,
            f"no worker has reported the GPU {request.uuid!r}: `leasehold get gpus` lists the GPUs",
            field="uuid",
        )

    async def ListGpus(self, request: ListGpusRequest, context: Context) -> ListGpusResponse:
        registry = self.fleet.registry
        workers = [registry.find(request.worker)] if request.worker else registry.all()
        wanted = await read_filter(self.fleet, request.filter, list_fields.GPUS)
        parents = [workers[0].hello.worker_id] if request.worker else []
        asked = page_request(request, list_orders.GPUS.parse(request.order_by), *parents)
        is_sorted = not request.order_by
        response = ListGpusResponse(
            unreachable=[known.hello.worker_id for known in workers if not known.reported]
        )
        page = await self._lists.page(
            map(current_views().gpu, self._gpus(_after(workers, asked.after if is_sorted else None))),
            asked,
            wanted,
            is_sorted=is_sorted,
            limit_bytes=PAGE_LIMIT_BYTES - response.ByteSize(),
        )
        response.gpus.extend(page.items)
        response.next_page_token = asked.token(page.last)
        return response

    async def WatchFleet(
        self, request: WatchFleetRequest, context: Context
    ) -> AsyncIterator[WatchFleetResponse]:
        wanted = await read_fleet_filter(self.fleet, request.filter)
        views = current_views()

        def view(response: WatchFleetResponse) -> WatchFleetResponse:
            if views.are_whole or not response.HasField("gpu"):
                return response
            return WatchFleetResponse(gpu=views.gpu(response.gpu))

        def shown(response: WatchFleetResponse) -> WatchFleetResponse:
            if response.HasField("worker") and not matches_fleet(wanted, response.worker):
                return WatchFleetResponse(deleted_worker_id=response.worker.worker_id)
            if response.HasField("gpu") and not matches_fleet(wanted, response.gpu):
                return WatchFleetResponse(deleted_gpu_uuid=response.gpu.gpu.uuid)
            return response

        responses = watch(
            self.fleet.fleet_hub,
            WatchFleetResponse,
            request.resume_token,
            self._snapshot(),
            scope=views.scope,
            view=view,
            shown=shown,
        )
        async with aclosing(responses):
            async for response in responses:
                yield response

    def _snapshot(self) -> Iterator[list[tuple[str, WatchFleetResponse]]]:
        """All workers, then the GPUs of one worker at a time: hundreds may watch, and never read."""
        worker_ids = [known.hello.worker_id for known in self.fleet.registry.all()]
        for worker_id in worker_ids:
            if (known := self.fleet.registry.get(worker_id)) is not None:
                yield [(worker_id, WatchFleetResponse(worker=self.fleet.worker(known)))]
        for worker_id in worker_ids:
            if (known := self.fleet.registry.get(worker_id)) is not None:
                yield [(gpu.gpu.uuid, WatchFleetResponse(gpu=gpu)) for gpu in self.fleet.gpus(known)]

    async def Cordon(self, request: CordonRequest, context: Context) -> CordonResponse:
        operation = Operation(cordon=request.operation)
        command = await self._requests.operate_worker(request, operation)
        return CordonResponse(command=command)

    async def Uncordon(self, request: UncordonRequest, context: Context) -> UncordonResponse:
        operation = Operation(uncordon=request.operation)
        command = await self._requests.operate_worker(request, operation)
        return UncordonResponse(command=command)

    async def ResetGpuHealth(
        self, request: ResetGpuHealthRequest, context: Context
    ) -> ResetGpuHealthResponse:
        operation = Operation(reset_gpu_health=request.operation)
        command = await self._requests.operate_worker(request, operation)
        return ResetGpuHealthResponse(command=command)

    async def DeleteWorker(self, request: DeleteWorkerRequest, context: Context) -> DeleteWorkerResponse:
        return await self._records.delete_worker(request)

    def _gpus(self, workers: Iterable[KnownWorker]) -> Iterator[FleetGpu]:
        """GPUs of workers that have reported, each worker's when it is its turn."""
        for known in workers:
            yield from self.fleet.gpus(known)


def _after(workers: Sequence[KnownWorker], position: Position | None) -> Iterator[KnownWorker]:
    """The workers from a position of the default order on, which begins with a worker's name and id."""
    first = None if position is None else tuple(part or "" for part in position[:2])
    for known in workers:
        if first is None or (known.hello.name, known.hello.worker_id) >= first:
            yield known
