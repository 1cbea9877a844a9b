"""What a coordinator can be asked without changing anything: what is, what happens, what would happen."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Final, Self

from leasehold.v1 import command_pb2, events_pb2, fleet_pb2
from leasehold.v1.command_pb2 import Command, Operation
from leasehold.v1.events_pb2 import Event
from leasehold.v1.events_pb2_grpc import EventServiceStub
from leasehold.v1.fleet_pb2 import FleetGpu, ListCheckpointsResponse, ListGpusResponse, Worker
from leasehold.v1.fleet_pb2_grpc import CommandServiceStub, FleetServiceStub, WorkloadServiceStub
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import EvictionPolicy, Workload

from leasehold_client.config import DEFAULT_COORDINATOR
from leasehold_client.coordinator.command_watch import Patience, watch_command
from leasehold_client.coordinator.connection import Connection
from leasehold_client.coordinator.retry import is_outage, resume
from leasehold_client.coordinator.workload_watch import Condition, wait_workload
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_client.messages import Moves, remapping, suspension, waking

CALL_TIMEOUT_S: Final = 10.0
"""Deadline of calls that only ask or create."""

PLAN_TIMEOUT_S: Final = 35.0
"""Deadline of plans, for which a worker looks at processes: it has 30 s, and then the coordinator says so."""

CHECKPOINTS_TIMEOUT_S: Final = 15.0
"""Deadline of calls for which workers list their checkpoints: they have 10 s, and then are named."""

PAGE_SIZE: Final = 1000


class Reader:
    """A connection to one coordinator. Methods raise :class:`LeaseholdError` where it refuses.

    Args:
        address: HOST:PORT of the coordinator.
    """

    def __init__(self, address: str = DEFAULT_COORDINATOR) -> None:
        self.address = address
        self._connection = Connection(address)
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
        """Closes the connection, within a second. Commands go on."""
        self._connection.close()

    def workers(self) -> list[Worker]:
        """Every worker that the coordinator knows."""
        pages = self._connection.pages(
            lambda token: self._fleet.ListWorkers(
                fleet_pb2.ListWorkersRequest(page_size=PAGE_SIZE, page_token=token), timeout=CALL_TIMEOUT_S
            )
        )
        return [worker for page in pages for worker in page.workers]

    def worker(self, worker: str) -> Worker:
        """The worker with this id or name."""
        with self._connection.decoded():
            request = fleet_pb2.GetWorkerRequest(worker=worker)
            return self._fleet.GetWorker(request, timeout=CALL_TIMEOUT_S).worker

    def list_gpus(self) -> ListGpusResponse:
        """Every GPU of the workers that have reported, and the ids of those that have not."""
        whole = ListGpusResponse()
        for page in self._connection.pages(
            lambda token: self._fleet.ListGpus(
                fleet_pb2.ListGpusRequest(page_size=PAGE_SIZE, page_token=token), timeout=CALL_TIMEOUT_S
            )
        ):
            whole.gpus.extend(page.gpus)
            whole.unreachable.extend(name for name in page.unreachable if name not in whole.unreachable)
        return whole

    def gpus(self) -> list[FleetGpu]:
        """Every GPU of the workers that have reported, by worker and slot."""
        return list(self.list_gpus().gpus)

    def workloads(self, *, include_ended: bool = False) -> list[Workload]:
        """Workloads, newest first."""
        pages = self._connection.pages(
            lambda token: self._workloads.ListWorkloads(
                fleet_pb2.ListWorkloadsRequest(
                    page_size=PAGE_SIZE, page_token=token, include_ended=include_ended
                ),
                timeout=CALL_TIMEOUT_S,
            )
        )
        return [workload for page in pages for workload in page.workloads]

    def workload(self, workload: str) -> Workload:
        """The workload with this id, or the newest with this name."""
        with self._connection.decoded():
            request = fleet_pb2.GetWorkloadRequest(workload=workload)
            return self._workloads.GetWorkload(request, timeout=CALL_TIMEOUT_S).workload

    def commands(self, limit: int = 100) -> list[Command]:
        """The newest commands, newest first."""
        with self._connection.decoded():
            request = fleet_pb2.ListCommandsRequest(page_size=limit)
            return list(self._commands.ListCommands(request, timeout=CALL_TIMEOUT_S).commands)

    def events(self, workload: str = "", limit: int = 100) -> list[Event]:
        """The newest events, newest first.

        Args:
            workload: Only those of the workload with this id or name. Empty: of everything.
            limit: How many at most.
        """
        with self._connection.decoded():
            request = events_pb2.ListEventsRequest(page_size=limit, workload=workload)
            return list(self._events.ListEvents(request, timeout=CALL_TIMEOUT_S).events)

    def command(self, command_id: str) -> Command:
        """The command with this id."""
        with self._connection.decoded():
            request = fleet_pb2.GetCommandRequest(command_id=command_id)
            return self._commands.GetCommand(request, timeout=CALL_TIMEOUT_S).command

    def list_checkpoints(self, *, worker: str = "", workload: str = "") -> ListCheckpointsResponse:
        """Checkpoints on the disks of the workers, newest first, and the ids of workers that did not answer.

        Args:
            worker: Only those of this worker, by id or name. Empty: of all.
            workload: Only those of this workload, by id or name, also of one that has ended. Empty: of all.
        """
        request = fleet_pb2.ListCheckpointsRequest(worker=worker, workload=workload)
        with self._connection.decoded():
            return self._workloads.ListCheckpoints(request, timeout=CHECKPOINTS_TIMEOUT_S)

    def plan_suspend(
        self,
        workload: str,
        *,
        policy: EvictionPolicy | None = None,
        force: bool = False,
        lock_timeout_s: float | None = None,
    ) -> Plan:
        """What a suspend would do, and everything that stands in its way."""
        operation = suspension(lock_timeout_s, policy, force=force)
        return self._plan(workload, Operation(suspend=operation))

    def plan_restore(self, workload: str, *, gpu_uuids: Sequence[str] = (), checkpoint_id: str = "") -> Plan:
        """What a restore would do, and everything that stands in its way."""
        return self._plan(workload, Operation(restore=waking(gpu_uuids, checkpoint_id)))

    def plan_remap(self, moves: Moves, *, lock_timeout_s: float | None = None) -> Plan:
        """What a remap would do, and everything that stands in its way."""
        return self._plan("", Operation(remap=remapping(moves, lock_timeout_s)))

    def plan_checkpoint(self, workload: str) -> Plan:
        """What a checkpoint would do, and everything that stands in its way."""
        return self._plan(workload, Operation(checkpoint=command_pb2.CheckpointOperation()))

    def _plan(self, workload: str, operation: Operation) -> Plan:
        request = fleet_pb2.PlanRequest(workload=workload, operation=operation)
        with self._connection.decoded():
            return self._workloads.Plan(request, timeout=PLAN_TIMEOUT_S).plan

    def watch(self, command: Command, patience: Patience | None = None) -> Iterator[Command]:
        """The command as it is, and each time that it changes, until it has ended.

        A coordinator that goes away is waited for, for 30 s each time.

        Args:
            command: The command.
            patience: How long it is waited for. None: until it has ended.

        Raises:
            NoCoordinatorError: It did not come back. The command goes on.
            StillOpenError: The patience is over. The command goes on.
        """
        return watch_command(partial(self._watch_once, command.command_id), patience)

    def _watch_once(self, command_id: str, timeout_s: float | None) -> Generator[Command]:
        request = fleet_pb2.WatchCommandRequest(command_id=command_id)
        call = self._commands.WatchCommand(request, timeout=timeout_s)
        with closing(self._connection.stream(call)) as stream:
            for response in stream:
                yield response.command
        raise NoCoordinatorError(f"{self.address} ended the watch of command {command_id}, which goes on")

    def wait(self, command: Command, patience: Patience | None = None) -> Command:
        """The command once it has ended. Raises as :meth:`watch` does."""
        for current in self.watch(command, patience):
            command = current
        return command

    def wait_workload(
        self, workload: str, condition: Condition = "ready", *, timeout_s: float | None = None
    ) -> Workload:
        """The workload once it is ready, or has ended.

        A coordinator that goes away is waited for, for 30 s each time.

        Args:
            workload: Id or name.
            condition: ``ready``: it runs, and its program is ready. ``ended``: it has ended, however.
            timeout_s: How long to wait. None: as long as it takes.

        Raises:
            NotYetError: The time is over.
            LeaseholdError: UNKNOWN_WORKLOAD, or WRONG_STATE where it ended before it was ready.
            NoCoordinatorError: The coordinator did not come back.
        """
        # By id: meanwhile the name may pass to another workload.
        workload_id = self.workload(workload).workload_id
        return wait_workload(partial(self._watch_workload, workload_id), workload, condition, timeout_s)

    def _watch_workload(self, workload_id: str, timeout_s: float | None) -> Generator[Workload]:
        request = fleet_pb2.WatchWorkloadsRequest(workload=workload_id)
        call = self._workloads.WatchWorkloads(request, timeout=timeout_s)
        with closing(self._connection.stream(call)) as stream:
            for response in stream:
                if response.HasField("workload"):
                    yield response.workload
        raise NoCoordinatorError(f"{self.address} ended the watch of workload {workload_id}, which goes on")

    def output(self, workload: str, *, offset: int = 0, follow: bool = False) -> Iterator[bytes]:
        """What a workload wrote, from a byte on: what there is, or until the workload has ended.

        A connection that breaks is made again where it broke, as in :meth:`watch`. So is, once it has begun
        or for somebody who follows, output whose worker is out of contact.

        Raises:
            LeaseholdError: UNKNOWN_WORKLOAD, or OUTPUT_UNAVAILABLE and it stays so.
            NoCoordinatorError: There is none, or it did not come back.
        """
        # By id: meanwhile the name may pass to another workload.
        workload_id = self.workload(workload).workload_id
        position = offset

        def passes(error: LeaseholdError) -> bool:
            return is_outage(error) or (
                error.reason == "OUTPUT_UNAVAILABLE" and (follow or position > offset)
            )

        def open_stream() -> Iterator[fleet_pb2.ReadWorkloadOutputResponse]:
            request = fleet_pb2.ReadWorkloadOutputRequest(
                workload=workload_id, offset=position, follow=follow
            )
            return self._connection.stream(self._workloads.ReadWorkloadOutput(request))

        for response in resume(open_stream, passes):
            position = response.next_offset
            yield response.data
