"""Calls to the coordinator that change nothing: lists, plans, watches and output."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Final, Self

from leasehold.v1 import (
    command_pb2,
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
from leasehold_client.coordinator.command_watch import CommandDeadline, watch_command
from leasehold_client.coordinator.connection import PAGE_SIZE, Connection
from leasehold_client.coordinator.retry import is_outage, is_transient, resume
from leasehold_client.coordinator.workload_watch import Condition, wait_workload
from leasehold_client.errors import CommandFailedError, LeaseholdError, NoCoordinatorError
from leasehold_client.messages import (
    Moves,
    command_state,
    operation_name,
    reason_name,
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

    def workers(self, *, filter: str = "", order_by: str = "") -> list[Worker]:
        """The workers that are known to the coordinator.

        Args:
            filter: Expression of AIP-160, such as ``state = CONNECTED AND labels.rack = r1``. Empty: all.
            order_by: Fields to sort by, such as ``state, name desc``. Empty: by name.
        """
        request = fleet_service_pb2.ListWorkersRequest(filter=filter, order_by=order_by)
        pages = self._connection.pages(self._fleet.ListWorkers, request)
        return [worker for page in pages for worker in page.workers]

    def worker(self, worker: str) -> Worker:
        """The worker with this id or name."""
        request = fleet_service_pb2.GetWorkerRequest(worker=worker)
        return self._connection.read(self._fleet.GetWorker, request).worker

    def list_gpus(self, *, filter: str = "", order_by: str = "") -> ListGpusResponse:
        """The GPUs of the workers that have reported, and the ids of the other workers.

        Args:
            filter: As of :meth:`workers`, such as ``gpu_name:H100 AND state = FREE``.
            order_by: As of :meth:`workers`. Empty: by worker and slot.
        """
        whole = ListGpusResponse()
        request = fleet_service_pb2.ListGpusRequest(filter=filter, order_by=order_by)
        for page in self._connection.pages(self._fleet.ListGpus, request):
            whole.gpus.extend(page.gpus)
            whole.unreachable.extend(name for name in page.unreachable if name not in whole.unreachable)
        return whole

    def gpus(self, *, filter: str = "", order_by: str = "") -> list[FleetGpu]:
        """The GPUs of the workers that have reported: :meth:`list_gpus` without the other workers."""
        return list(self.list_gpus(filter=filter, order_by=order_by).gpus)

    def workloads(
        self, *, include_ended: bool = False, filter: str = "", order_by: str = ""
    ) -> list[Workload]:
        """Workloads.

        Args:
            include_ended: Whether workloads that have ended are listed too.
            filter: As of :meth:`workers`, such as ``labels.team = vision AND NOT state = RUNNING``.
            order_by: As of :meth:`workers`. Empty: the newest first.
        """
        request = workload_service_pb2.ListWorkloadsRequest(
            include_ended=include_ended, filter=filter, order_by=order_by
        )
        pages = self._connection.pages(self._workloads.ListWorkloads, request)
        return [workload for page in pages for workload in page.workloads]

    def workload(self, workload: str) -> Workload:
        """The workload with this id, or the newest with this name."""
        request = workload_service_pb2.GetWorkloadRequest(workload=workload)
        return self._connection.read(self._workloads.GetWorkload, request).workload

    def commands(self, limit: int = 100, *, filter: str = "", order_by: str = "") -> list[Command]:
        """The first commands of the list.

        Args:
            limit: Largest number of commands.
            filter: As of :meth:`workers`, such as ``state = FAILED AND operation = suspend``.
            order_by: ``create_time`` or ``create_time desc``. Empty: the newest first.
        """
        request = command_service_pb2.ListCommandsRequest(filter=filter, order_by=order_by)
        pages = self._connection.pages(self._commands.ListCommands, request, min(limit, PAGE_SIZE))
        return list(islice((command for page in pages for command in page.commands), limit))

    def events(
        self, workload: str = "", limit: int = 100, *, filter: str = "", order_by: str = ""
    ) -> list[Event]:
        """The first events of the list.

        Args:
            workload: Only events of the workload with this id or name. Empty: all events.
            limit: Largest number of events.
            filter: As of :meth:`workers`, such as ``kind = GPU_HEALTH AND worker = alpha``.
            order_by: ``time`` or ``time desc``. Empty: the newest first.
        """
        request = event_service_pb2.ListEventsRequest(workload=workload, filter=filter, order_by=order_by)
        pages = self._connection.pages(self._events.ListEvents, request, min(limit, PAGE_SIZE))
        return list(islice((event for page in pages for event in page.events), limit))

    def command(self, command_id: str) -> Command:
        """The command with this id."""
        request = command_service_pb2.GetCommandRequest(command_id=command_id)
        return self._connection.read(self._commands.GetCommand, request).command

    def list_checkpoints(
        self, *, worker: str = "", workload: str = "", filter: str = ""
    ) -> ListCheckpointsResponse:
        """Checkpoints on the disks of the workers, the newest first, and the ids of workers without answer.

        Args:
            worker: Only checkpoints of this worker, by id or name. Empty: all workers.
            workload: Only checkpoints of this workload, by id or name, also after its end. Empty: all.
            filter: As of :meth:`workers`, such as ``kind = IMAGE AND in_use = false``.
        """
        request = workload_service_pb2.ListCheckpointsRequest(worker=worker, workload=workload, filter=filter)
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

    def plan_restore(
        self, workload: str, *, gpu_uuids: Sequence[str] = (), checkpoint_id: str = "", hold_id: str = ""
    ) -> Plan:
        """The plan of a restore: its effects, checks and refusals."""
        operation = restore_operation(gpu_uuids, checkpoint_id, hold_id)
        return self._plan(PlanRequest(workload=workload, restore=operation))

    def plan_remap(self, moves: Moves, *, lock_timeout_s: float | None = None) -> Plan:
        """The plan of a remap: its effects, checks and refusals."""
        return self._plan(PlanRequest(remap=remap_operation(moves, lock_timeout_s)))

    def plan_checkpoint(self, workload: str) -> Plan:
        """The plan of a checkpoint: its effects, checks and refusals."""
        return self._plan(PlanRequest(workload=workload, checkpoint=operation_pb2.CheckpointOperation()))

    def _plan(self, request: PlanRequest) -> Plan:
        return self._connection.read(self._workloads.Plan, request, PLAN_TIMEOUT_S).plan

    def watch(self, command: Command, *, timeout_s: float | None = None) -> Iterator[Command]:
        """Yields the command now and after each change, until it has ended.

        An outage of the coordinator is tolerated for 30 s. No error ends the command itself.

        Args:
            command: The command.
            timeout_s: Longest wait. None: until the command has been UNKNOWN for 30 s beyond its own timeout.

        Raises:
            NoCoordinatorError: The outage lasted longer.
            CommandWaitTimeoutError: The wait is over.
        """
        deadline = CommandDeadline(command, timeout_s)
        return watch_command(partial(self._watch_once, command.command_id), deadline)

    def _watch_once(self, command_id: str, timeout_s: float | None) -> Generator[Command]:
        request = command_service_pb2.WatchCommandRequest(command_id=command_id)
        call = self._commands.WatchCommand(request, timeout=timeout_s)
        with closing(self._connection.stream(call)) as stream:
            for response in stream:
                yield response.command
        raise NoCoordinatorError(
            f"{self.address} ended the watch of command {command_id}; the command continues"
        )

    def wait(self, command: Command, *, timeout_s: float | None = None, check: bool = True) -> Command:
        """Waits until a command has ended, and returns it.

        Args:
            command: The command.
            timeout_s: As of :meth:`watch`.
            check: Whether an end without success raises an error.

        Raises:
            CommandFailedError: The command ended FAILED, REJECTED, CANCELLED or EXPIRED.
            NoCoordinatorError: As of :meth:`watch`.
            CommandWaitTimeoutError: As of :meth:`watch`.
        """
        for current in self.watch(command, timeout_s=timeout_s):
            command = current
        if check and command.state != command_pb2.COMMAND_STATE_SUCCEEDED:
            raise CommandFailedError(
                f"{operation_name(command)} {command_state(command)}: {command.error.message}",
                reason_name(command.error.reason),
                command,
            )
        return command

    def wait_workload(
        self, workload: str, condition: Condition = "ready", *, timeout_s: float | None = None
    ) -> Workload:
        """Waits until a workload is ready or has ended, and returns the workload.

        An outage of the coordinator is tolerated for 30 s.

        Args:
            workload: Id or name.
            condition: ``ready``: RUNNING, and its program is ready. ``ended``: EXITED, FAILED or RELEASED.
            timeout_s: Longest wait. None: no limit.

        Raises:
            WaitTimeoutError: The wait timed out.
            LeaseholdError: UNKNOWN_WORKLOAD, or WRONG_STATE if the workload ended before it was ready.
            NoCoordinatorError: The outage lasted longer.
        """
        # By id, since another workload may get the name during the wait.
        workload_id = self.workload(workload).workload_id
        return wait_workload(partial(self._watch_workload, workload_id), workload, condition, timeout_s)

    def _watch_workload(self, workload_id: str, timeout_s: float | None) -> Generator[Workload]:
        request = workload_service_pb2.WatchWorkloadsRequest(workload=workload_id)
        call = self._workloads.WatchWorkloads(request, timeout=timeout_s)
        with closing(self._connection.stream(call)) as stream:
            for response in stream:
                if response.HasField("workload"):
                    yield response.workload
        raise NoCoordinatorError(
            f"{self.address} ended the watch of workload {workload_id}; the workload continues"
        )

    def output(self, workload: str, *, offset: int = 0, follow: bool = False) -> Iterator[bytes]:
        """Yields the output of a workload.

        A broken stream is resumed at its position, as in :meth:`watch`. A worker that is out of contact is
        an outage too if ``follow`` is set or output has already been read.

        Args:
            workload: Id or name.
            offset: Position of the first byte.
            follow: Whether the iteration lasts until the workload has ended.

        Raises:
            LeaseholdError: UNKNOWN_WORKLOAD, WORKER_UNAVAILABLE or OUTPUT_UNAVAILABLE.
            NoCoordinatorError: No coordinator answers, or the outage lasted longer than 30 s.
        """
        # By id, since another workload may get the name while the output is read.
        workload_id = self.workload(workload).workload_id
        position = offset

        def may_reopen(error: LeaseholdError) -> bool:
            return is_outage(error) or (is_transient(error) and (follow or position > offset))

        def open_stream() -> Iterator[workload_service_pb2.ReadWorkloadOutputResponse]:
            request = workload_service_pb2.ReadWorkloadOutputRequest(
                workload=workload_id, offset=position, follow=follow
            )
            return self._connection.stream(self._workloads.ReadWorkloadOutput(request))

        for response in resume(open_stream, may_reopen):
            position = response.next_offset
            yield response.data
