"""The coordinator's API for Python programs: synchronous, typed, and safe to repeat."""

import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Final, Self, final

from leasehold.v1 import command_pb2, events_pb2, fleet_pb2
from leasehold.v1.command_pb2 import Command, Operation
from leasehold.v1.events_pb2 import Event
from leasehold.v1.events_pb2_grpc import EventServiceStub
from leasehold.v1.fleet_pb2 import FleetGpu, ListGpusResponse, Worker
from leasehold.v1.fleet_pb2_grpc import CommandServiceStub, FleetServiceStub, WorkloadServiceStub
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec

from leasehold_client.config import DEFAULT_COORDINATOR
from leasehold_client.connection import Connection
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_client.operations import Moves, duration, remapping, suspension
from leasehold_client.resuming import is_outage, resume
from leasehold_client.watching import Patience, watch_command

CALL_TIMEOUT_S: Final = 10.0
"""Deadline of calls that only ask or create."""

PLAN_TIMEOUT_S: Final = 35.0
"""Deadline of plans, for which a worker looks at processes: it has 30 s, and then the coordinator says so."""

PAGE_SIZE: Final = 1000


@final
class Client:
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

    def run(
        self,
        spec: WorkloadSpec,
        *,
        name: str = "",
        worker: str = "",
        gpu_uuids: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> tuple[Workload, Command]:
        """Creates a workload, and the command that starts it."""
        request = fleet_pb2.CreateWorkloadRequest(
            request_id=_request_id(),
            name=name,
            spec=spec,
            worker=worker,
            gpu_uuids=gpu_uuids,
            timeout=duration(timeout_s),
        )
        response = self._connection.create(
            lambda: self._workloads.CreateWorkload(request, timeout=CALL_TIMEOUT_S)
        )
        return response.workload, response.command

    def suspend(
        self, workload: str, *, lock_timeout_s: float | None = None, timeout_s: float | None = None
    ) -> Command:
        """Parks a workload; its GPUs are free for others afterwards.

        Args:
            workload: Id or name.
            lock_timeout_s: How long submitted GPU work may take to drain. None: 10 s.
            timeout_s: How long the command may wait and take. None: 10 min.
        """
        request = fleet_pb2.SuspendWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=suspension(lock_timeout_s),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.SuspendWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def restore(
        self, workload: str, *, gpu_uuids: Sequence[str] = (), timeout_s: float | None = None
    ) -> Command:
        """Wakes a parked workload: on the same GPUs if they are free, or on those named, in its order."""
        request = fleet_pb2.RestoreWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=command_pb2.RestoreOperation(gpu_uuids=gpu_uuids),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.RestoreWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def remap(
        self, moves: Moves, *, lock_timeout_s: float | None = None, timeout_s: float | None = None
    ) -> Command:
        """Moves running workloads to other GPUs of their worker, all or none: so two can swap theirs.

        Args:
            moves: The workloads, and which GPU takes the place of which. GPUs that are not named stay.
            lock_timeout_s: How long submitted GPU work may take to drain. None: 10 s.
            timeout_s: How long the command may wait and take. None: 10 min.
        """
        request = fleet_pb2.RemapWorkloadsRequest(
            request_id=_request_id(),
            operation=remapping(moves, lock_timeout_s),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.RemapWorkloads, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def plan_suspend(self, workload: str, *, lock_timeout_s: float | None = None) -> Plan:
        """What :meth:`suspend` would do, and everything that stands in its way. Changes nothing."""
        return self._plan(workload, Operation(suspend=suspension(lock_timeout_s)))

    def plan_restore(self, workload: str, *, gpu_uuids: Sequence[str] = ()) -> Plan:
        """What :meth:`restore` would do, and everything that stands in its way. Changes nothing."""
        return self._plan(workload, Operation(restore=command_pb2.RestoreOperation(gpu_uuids=gpu_uuids)))

    def plan_remap(self, moves: Moves, *, lock_timeout_s: float | None = None) -> Plan:
        """What :meth:`remap` would do, and everything that stands in its way. Changes nothing."""
        return self._plan("", Operation(remap=remapping(moves, lock_timeout_s)))

    def _plan(self, workload: str, operation: Operation) -> Plan:
        request = fleet_pb2.PlanRequest(workload=workload, operation=operation)
        with self._connection.decoded():
            return self._workloads.Plan(request, timeout=PLAN_TIMEOUT_S).plan

    def stop(
        self,
        workload: str,
        *,
        grace_s: float | None = None,
        force: bool = False,
        timeout_s: float | None = None,
    ) -> Command:
        """Ends a workload: SIGTERM, and SIGKILL after the grace.

        Args:
            workload: Id or name.
            grace_s: Time between the two. None: 10 s.
            force: Kill processes that were restored even where they can't be suspended first, which can
                hang their host.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.StopWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=command_pb2.StopOperation(grace=duration(grace_s), force=force),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.StopWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def adopt(
        self, pid: int, *, worker: str, name: str = "", timeout_s: float | None = None
    ) -> tuple[Workload, Command]:
        """Takes in a process that runs already, with its descendants, as a workload that leases its GPUs.

        Args:
            pid: Its process id on the worker's host.
            worker: Id or name of the worker.
            name: What to call it. Empty: made up.
            timeout_s: How long the command may wait and take. None: 60 s.

        Returns:
            The workload that it becomes, still PENDING, and the command that takes it in.
        """
        request = fleet_pb2.AdoptProcessRequest(
            request_id=_request_id(),
            worker=worker,
            operation=command_pb2.AdoptOperation(name=name, pid=pid),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.AdoptProcess, request, timeout=CALL_TIMEOUT_S)
        response = self._connection.create(call)
        return response.workload, response.command

    def release(self, workload: str, *, timeout_s: float | None = None) -> Command:
        """Lets a workload go that was adopted, or that claimed its GPUs: it runs on, and its lease ends.

        Args:
            workload: Id or name.
            timeout_s: How long the command may wait and take. None: 60 s.

        Raises:
            LeaseholdError: WRONG_STATE where it was started by Leasehold, or is parked.
        """
        request = fleet_pb2.ReleaseWorkloadRequest(
            request_id=_request_id(), workload=workload, timeout=duration(timeout_s)
        )
        call = partial(self._workloads.ReleaseWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def cordon(
        self,
        worker: str,
        gpu_uuids: Sequence[str] = (),
        *,
        reason: str,
        cordoned_by: str,
        timeout_s: float | None = None,
    ) -> Command:
        """Takes GPUs, or a whole worker, out of service: who has one keeps it, and nobody else gets it.

        Args:
            worker: Id or name.
            gpu_uuids: Its GPUs. Empty: the whole worker, which then starts nothing.
            reason: Why, in 256 characters at most.
            cordoned_by: Who says so, likewise.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        operation = command_pb2.CordonOperation(gpu_uuids=gpu_uuids, reason=reason, cordoned_by=cordoned_by)
        request = fleet_pb2.CordonRequest(
            request_id=_request_id(), worker=worker, operation=operation, timeout=duration(timeout_s)
        )
        return self._connection.create(partial(self._fleet.Cordon, request, timeout=CALL_TIMEOUT_S)).command

    def uncordon(
        self, worker: str, gpu_uuids: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> Command:
        """Puts GPUs, or a whole worker, back into service.

        Args:
            worker: Id or name.
            gpu_uuids: Its GPUs. Empty: the whole worker; GPUs that were cordoned one by one stay so.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.UncordonRequest(
            request_id=_request_id(),
            worker=worker,
            operation=command_pb2.UncordonOperation(gpu_uuids=gpu_uuids),
            timeout=duration(timeout_s),
        )
        return self._connection.create(partial(self._fleet.Uncordon, request, timeout=CALL_TIMEOUT_S)).command

    def reset_gpu_health(
        self, worker: str, gpu_uuids: Sequence[str], *, timeout_s: float | None = None
    ) -> Command:
        """Forgets what is known against GPUs of a worker. What is still the case is soon found again.

        Args:
            worker: Id or name.
            gpu_uuids: Its GPUs, at least one.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.ResetGpuHealthRequest(
            request_id=_request_id(),
            worker=worker,
            operation=command_pb2.ResetGpuHealthOperation(gpu_uuids=gpu_uuids),
            timeout=duration(timeout_s),
        )
        call = partial(self._fleet.ResetGpuHealth, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def cancel(self, command_id: str) -> Command:
        """Asks for a command that has not ended to be cancelled, and returns it as it is then.

        One that was never sent has ended at once. For another its worker decides: :meth:`wait` tells how it
        ended. One that had ended stays as it is.

        Raises:
            LeaseholdError: UNKNOWN_COMMAND, or WORKER_UNAVAILABLE where its worker can't be asked.
        """
        request = fleet_pb2.CancelCommandRequest(command_id=command_id)
        call = partial(self._commands.CancelCommand, request, timeout=CALL_TIMEOUT_S)
        return self._connection.repeated(call).command

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


def _request_id() -> str:
    return uuid.uuid4().hex
