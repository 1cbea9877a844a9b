"""The coordinator's API for Python programs: synchronous, typed, and safe to repeat."""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol, Self, TypeVar, final

import grpc
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, fleet_pb2, gpu_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.fleet_pb2 import FleetGpu, ListGpusResponse, Worker
from leasehold.v1.fleet_pb2_grpc import CommandServiceStub, FleetServiceStub, WorkloadServiceStub
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec

from leasehold_client.config import DEFAULT_COORDINATOR
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, decode_error
from leasehold_client.resuming import CONNECT_TIMEOUT_S, is_outage, repeat, resume

CALL_TIMEOUT_S: Final = 10.0
"""Deadline of calls that only ask or create."""

CLOSE_TIMEOUT_S: Final = 1.0
PAGE_SIZE: Final = 1000

OPTIONS: Final[list[tuple[str, int]]] = [
    # A restarted coordinator is to be found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # In gRPC this is the time that one attempt to connect may take: a far or busy coordinator needs some.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
]

ENDED: Final = frozenset(
    {
        command_pb2.COMMAND_STATE_SUCCEEDED,
        command_pb2.COMMAND_STATE_FAILED,
        command_pb2.COMMAND_STATE_REJECTED,
        command_pb2.COMMAND_STATE_CANCELLED,
        command_pb2.COMMAND_STATE_EXPIRED,
    }
)

Response = TypeVar("Response")


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


Page = TypeVar("Page", bound=_Page)


def has_ended(state: CommandState.ValueType) -> bool:
    """Whether a command in this state has ended."""
    return state in ENDED


@final
class Client:
    """A connection to one coordinator. Methods raise :class:`LeaseholdError` where it refuses.

    Args:
        address: HOST:PORT of the coordinator.
    """

    def __init__(self, address: str = DEFAULT_COORDINATOR) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._fleet = FleetServiceStub(self._channel)
        self._workloads = WorkloadServiceStub(self._channel)
        self._commands = CommandServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Commands go on.

        It returns within a second, even where gRPC never finishes: an exception of a signal handler, such as
        KeyboardInterrupt, can leave a call behind that `Channel.close` waits for (grpc/grpc#19973).
        """
        closing = threading.Thread(target=self._channel.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    @contextmanager
    def _decoded(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise decode_error(error, self.address) from error

    def _create(self, call: Callable[[], Response]) -> Response:
        """The answer of a creating call. One that was lost is asked for again, by the same request_id."""

        def attempt() -> Response:
            with self._decoded():
                return call()

        try:
            return repeat(attempt)
        except NoCoordinatorError as error:
            raise NoCoordinatorError(
                f"{error.message}; what it stored before goes on: `leasehold get commands` shows it",
                code=error.code,
            ) from error

    def _pages(self, read_page: Callable[[str], Page]) -> Iterator[Page]:
        """Every page of a list, given how one is read by its token."""
        token = ""
        while True:
            with self._decoded():
                page = read_page(token)
            yield page
            if not (token := page.next_page_token):
                return

    def _stream(self, call: "grpc._CallIterator[Response]") -> Iterator[Response]:
        """The responses of a call, which ends with the iteration."""
        try:
            with self._decoded():
                yield from call
        finally:
            call.cancel()

    def workers(self) -> list[Worker]:
        """Every worker that the coordinator knows."""
        pages = self._pages(
            lambda token: self._fleet.ListWorkers(
                fleet_pb2.ListWorkersRequest(page_size=PAGE_SIZE, page_token=token), timeout=CALL_TIMEOUT_S
            )
        )
        return [worker for page in pages for worker in page.workers]

    def worker(self, worker: str) -> Worker:
        """The worker with this id or name."""
        with self._decoded():
            request = fleet_pb2.GetWorkerRequest(worker=worker)
            return self._fleet.GetWorker(request, timeout=CALL_TIMEOUT_S).worker

    def list_gpus(self) -> ListGpusResponse:
        """Every GPU of the workers that have reported, and the ids of those that have not."""
        whole = ListGpusResponse()
        for page in self._pages(
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
        pages = self._pages(
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
        with self._decoded():
            request = fleet_pb2.GetWorkloadRequest(workload=workload)
            return self._workloads.GetWorkload(request, timeout=CALL_TIMEOUT_S).workload

    def commands(self, limit: int = 100) -> list[Command]:
        """The newest commands, newest first."""
        with self._decoded():
            request = fleet_pb2.ListCommandsRequest(page_size=limit)
            return list(self._commands.ListCommands(request, timeout=CALL_TIMEOUT_S).commands)

    def command(self, command_id: str) -> Command:
        """The command with this id."""
        with self._decoded():
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
            timeout=_duration(timeout_s),
        )
        response = self._create(lambda: self._workloads.CreateWorkload(request, timeout=CALL_TIMEOUT_S))
        return response.workload, response.command

    def suspend(self, workload: str, *, timeout_s: float | None = None) -> Command:
        """Parks a workload; its GPUs are free for others afterwards."""
        request = fleet_pb2.SuspendWorkloadRequest(
            request_id=_request_id(), workload=workload, timeout=_duration(timeout_s)
        )
        return self._create(lambda: self._workloads.SuspendWorkload(request, timeout=CALL_TIMEOUT_S)).command

    def restore(
        self, workload: str, *, gpu_uuids: Sequence[str] = (), timeout_s: float | None = None
    ) -> Command:
        """Wakes a parked workload: on the same GPUs if they are free, or on those named, in its order."""
        request = fleet_pb2.RestoreWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=command_pb2.RestoreOperation(gpu_uuids=gpu_uuids),
            timeout=_duration(timeout_s),
        )
        return self._create(lambda: self._workloads.RestoreWorkload(request, timeout=CALL_TIMEOUT_S)).command

    def remap(
        self, workload: str, pairs: Sequence[tuple[str, str]], *, timeout_s: float | None = None
    ) -> Command:
        """Moves a running workload to other GPUs of its worker, by (old UUID, new UUID)."""
        messages = [gpu_pb2.GpuPair(old_uuid=old, new_uuid=new) for old, new in pairs]
        move = command_pb2.Move(workload_id=workload, pairs=messages)
        request = fleet_pb2.RemapWorkloadsRequest(
            request_id=_request_id(),
            operation=command_pb2.RemapOperation(moves=[move]),
            timeout=_duration(timeout_s),
        )
        return self._create(lambda: self._workloads.RemapWorkloads(request, timeout=CALL_TIMEOUT_S)).command

    def stop(self, workload: str, *, grace_s: float | None = None, timeout_s: float | None = None) -> Command:
        """Ends a workload: SIGTERM, and SIGKILL after the grace."""
        request = fleet_pb2.StopWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=command_pb2.StopOperation(grace=_duration(grace_s)),
            timeout=_duration(timeout_s),
        )
        return self._create(lambda: self._workloads.StopWorkload(request, timeout=CALL_TIMEOUT_S)).command

    def watch(self, command: Command) -> Iterator[Command]:
        """The command as it is, and each time that it changes, until it has ended.

        A coordinator that goes away is waited for, for 30 s each time.

        Raises:
            NoCoordinatorError: It did not come back. The command goes on.
        """
        revision = -1
        for current in resume(lambda: self._watch_once(command.command_id)):
            if current.revision > revision:
                revision = current.revision
                yield current
            if has_ended(current.state):
                return

    def _watch_once(self, command_id: str) -> Iterator[Command]:
        request = fleet_pb2.WatchCommandRequest(command_id=command_id)
        for response in self._stream(self._commands.WatchCommand(request)):
            yield response.command
        raise NoCoordinatorError(f"{self.address} ended the watch of command {command_id}, which goes on")

    def wait(self, command: Command) -> Command:
        """The command once it has ended."""
        for current in self.watch(command):
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
            return self._stream(self._workloads.ReadWorkloadOutput(request))

        for response in resume(open_stream, passes):
            position = response.next_offset
            yield response.data


def _request_id() -> str:
    return uuid.uuid4().hex


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message
