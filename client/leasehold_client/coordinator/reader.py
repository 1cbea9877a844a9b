"""Calls to the coordinator that change nothing: single messages, lists and plans."""

from collections.abc import Callable, Sequence
from typing import Final, Self

from leasehold.v1 import (
    command_service_pb2,
    event_service_pb2,
    fleet_service_pb2,
    operation_pb2,
    workload_service_pb2,
)
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.fleet_service_pb2 import ListGpusResponse
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import ListCheckpointsResponse, PlanRequest
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub

from leasehold_client.config import DEFAULT_COORDINATOR
from leasehold_client.coordinator.connection import Connection
from leasehold_client.errors import LeaseholdError
from leasehold_client.messages import (
    Moves,
    remap_operation,
    restore_operation,
    suspend_operation,
)

PLAN_TIMEOUT_S: Final = 35.0
"""Deadline of plans. The worker has 30 s to inspect processes, and then the coordinator answers."""

CHECKPOINTS_TIMEOUT_S: Final = 15.0
"""Deadline of lists of checkpoints. Workers have 10 s, and then the coordinator names the silent ones."""


class Reader:
    """A connection to one coordinator. Methods raise :class:`LeaseholdError` for a refusal.

    Args:
        address: HOST:PORT of the coordinator.
        on_wait: Called before each wait for another attempt, with the error that is waited out.
    """

    def __init__(
        self,
        address: str = DEFAULT_COORDINATOR,
        on_wait: Callable[[LeaseholdError], None] = lambda error: None,
    ) -> None:
        self.address = address
        self._connection = Connection(address, on_wait)
        channel = self._connection.channel
        self._fleet = FleetServiceStub(channel)
        self._workloads = WorkloadServiceStub(channel)
        self._commands = CommandServiceStub(channel)
        self._events = EventServiceStub(channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection within a second. Commands continue."""
        self._connection.close()

    def workers(self) -> list[Worker]:
        """Every worker that is known to the coordinator."""
        pages = self._connection.pages(self._fleet.ListWorkers, fleet_service_pb2.ListWorkersRequest())
        return [worker for page in pages for worker in page.workers]

    def worker(self, worker: str) -> Worker:
        """The worker with this id or name."""
        request = fleet_service_pb2.GetWorkerRequest(worker=worker)
        return self._connection.read(self._fleet.GetWorker, request).worker

    def list_gpus(self) -> ListGpusResponse:
        """Every GPU of the workers that have reported, and the ids of the other workers."""
        whole = ListGpusResponse()
        for page in self._connection.pages(self._fleet.ListGpus, fleet_service_pb2.ListGpusRequest()):
            whole.gpus.extend(page.gpus)
            whole.unreachable.extend(name for name in page.unreachable if name not in whole.unreachable)
        return whole

    def gpus(self) -> list[FleetGpu]:
        """Every GPU of the workers that have reported, by worker and slot."""
        return list(self.list_gpus().gpus)

    def workloads(self, *, include_ended: bool = False) -> list[Workload]:
        """Workloads, the newest first."""
        request = workload_service_pb2.ListWorkloadsRequest(include_ended=include_ended)
        pages = self._connection.pages(self._workloads.ListWorkloads, request)
        return [workload for page in pages for workload in page.workloads]

    def workload(self, workload: str) -> Workload:
        """The workload with this id, or the newest with this name."""
        request = workload_service_pb2.GetWorkloadRequest(workload=workload)
        return self._connection.read(self._workloads.GetWorkload, request).workload

    def commands(self, limit: int = 100) -> list[Command]:
        """The newest commands, the newest first."""
        request = command_service_pb2.ListCommandsRequest(page_size=limit)
        return list(self._connection.read(self._commands.ListCommands, request).commands)

    def events(self, workload: str = "", limit: int = 100) -> list[Event]:
        """The newest events, the newest first.

        Args:
            workload: Only events of the workload with this id or name. Empty: all events.
            limit: Largest number of events.
        """
        request = event_service_pb2.ListEventsRequest(page_size=limit, workload=workload)
        return list(self._connection.read(self._events.ListEvents, request).events)

    def command(self, command_id: str) -> Command:
        """The command with this id."""
        request = command_service_pb2.GetCommandRequest(command_id=command_id)
        return self._connection.read(self._commands.GetCommand, request).command

    def list_checkpoints(self, *, worker: str = "", workload: str = "") -> ListCheckpointsResponse:
        """Checkpoints on the disks of the workers, the newest first, and the ids of workers without answer.

        Args:
            worker: Only checkpoints of this worker, by id or name. Empty: all workers.
            workload: Only checkpoints of this workload, by id or name, also after its end. Empty: all.
        """
        request = workload_service_pb2.ListCheckpointsRequest(worker=worker, workload=workload)
        return self._connection.read(self._workloads.ListCheckpoints, request, CHECKPOINTS_TIMEOUT_S)

    def plan_suspend(
        self,
        workload: str,
        *,
        policy: EvictionPolicy | None = None,
        force: bool = False,
        lock_timeout_s: float | None = None,
    ) -> Plan:
        """The plan of a suspend: its effects, checks and refusals."""
        operation = suspend_operation(lock_timeout_s, policy, force=force)
        return self._plan(PlanRequest(workload=workload, suspend=operation))

    def plan_restore(self, workload: str, *, gpu_uuids: Sequence[str] = (), checkpoint_id: str = "") -> Plan:
        """The plan of a restore: its effects, checks and refusals."""
        operation = restore_operation(gpu_uuids, checkpoint_id)
        return self._plan(PlanRequest(workload=workload, restore=operation))

    def plan_remap(self, moves: Moves, *, lock_timeout_s: float | None = None) -> Plan:
        """The plan of a remap: its effects, checks and refusals."""
        return self._plan(PlanRequest(remap=remap_operation(moves, lock_timeout_s)))

    def plan_checkpoint(self, workload: str) -> Plan:
        """The plan of a checkpoint: its effects, checks and refusals."""
        return self._plan(PlanRequest(workload=workload, checkpoint=operation_pb2.CheckpointOperation()))

    def _plan(self, request: PlanRequest) -> Plan:
        return self._connection.read(self._workloads.Plan, request, PLAN_TIMEOUT_S).plan
