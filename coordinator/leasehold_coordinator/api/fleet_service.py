"""FleetService: the workers and their GPUs."""

from collections.abc import AsyncGenerator, Iterator, Sequence
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
from leasehold_coordinator.core.paging import next_token, page_of, page_within
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.fleet_reader import FleetReader


@final
class FleetService(FleetServiceServicer):
    """Serves workers and GPUs from the registry, and creates commands about them."""

    def __init__(self, fleet: FleetReader, requests: CommandCreation, records: RecordChanges) -> None:
        self.fleet = fleet
        self._requests = requests
        self._records = records

    async def GetWorker(self, request: GetWorkerRequest, context: Context) -> GetWorkerResponse:
        known = self.fleet.registry.find(request.worker)
        return GetWorkerResponse(worker=self.fleet.worker(known))

    async def ListWorkers(self, request: ListWorkersRequest, context: Context) -> ListWorkersResponse:
        offset, size = page_of(request.page_size, request.page_token)
        found = self.fleet.registry.all()[offset : offset + size + 1]
        page = page_within([self.fleet.worker(known) for known in found], size)
        return ListWorkersResponse(
            workers=page, next_page_token=next_token(offset, len(page), more=len(found) > len(page))
        )

    async def GetGpu(self, request: GetGpuRequest, context: Context) -> GetGpuResponse:
        owner = self.fleet.registry.owner(request.uuid)
        for gpu in self.fleet.gpus(owner) if owner is not None else ():
            if gpu.gpu.uuid == request.uuid:
                return GetGpuResponse(gpu=gpu)
        raise FleetError(
            errors_pb2.ERROR_REASON_UNKNOWN_GPU,
            f"no worker has reported the GPU {request.uuid!r}: `leasehold get gpus` lists the GPUs",
            field="uuid",
        )

    async def ListGpus(self, request: ListGpusRequest, context: Context) -> ListGpusResponse:
        offset, size = page_of(request.page_size, request.page_token)
        registry = self.fleet.registry
        workers = [registry.find(request.worker)] if request.worker else registry.all()
        found = self._some_gpus(workers, offset, size + 1)
        page = page_within(found, size)
        return ListGpusResponse(
            gpus=page,
            next_page_token=next_token(offset, len(page), more=len(found) > len(page)),
            unreachable=[known.hello.worker_id for known in workers if not known.reported],
        )

    def WatchFleet(self, request: WatchFleetRequest, context: Context) -> AsyncGenerator[WatchFleetResponse]:
        return watch(self.fleet.fleet_hub, WatchFleetResponse, request.resume_token, self._snapshot())

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
        return CordonResponse(command=await self._requests.operate_worker(request, operation))

    async def Uncordon(self, request: UncordonRequest, context: Context) -> UncordonResponse:
        operation = Operation(uncordon=request.operation)
        return UncordonResponse(command=await self._requests.operate_worker(request, operation))

    async def ResetGpuHealth(
        self, request: ResetGpuHealthRequest, context: Context
    ) -> ResetGpuHealthResponse:
        operation = Operation(reset_gpu_health=request.operation)
        return ResetGpuHealthResponse(command=await self._requests.operate_worker(request, operation))

    async def DeleteWorker(self, request: DeleteWorkerRequest, context: Context) -> DeleteWorkerResponse:
        return await self._records.delete_worker(request)

    def _some_gpus(self, workers: Sequence[KnownWorker], offset: int, limit: int) -> list[FleetGpu]:
        """GPUs of workers that have reported, from an offset on. Messages before the offset are not built."""
        found: list[FleetGpu] = []
        for known in workers:
            if len(found) >= limit:
                break
            count = len(known.hello.gpus) if known.reported else 0
            if offset < count:
                found += self.fleet.gpus(known)[offset:]
            offset = max(0, offset - count)
        return found[:limit]
