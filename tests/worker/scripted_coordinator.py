"""A coordinator that does what a test says, on a real socket."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
from google.protobuf import duration_pb2, timestamp_pb2
from leasehold.v1 import command_pb2, operation_pb2
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    CommandAck,
    CommandFrame,
    CommandSpec,
    CommandUpdate,
    ConnectRequest,
    ConnectResponse,
    Hello,
    ProtocolVersion,
    Welcome,
)

from tests.channels import server_credentials

TERMINAL = {
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_REJECTED,
    command_pb2.COMMAND_STATE_CANCELLED,
    command_pb2.COMMAND_STATE_EXPIRED,
}
TIMEOUT_S = 30


@dataclass
class Session:
    """One stream of a worker: what came up, and the means to send down."""

    hello: Hello
    epoch: int
    down: queue.Queue[ConnectResponse | bytes | None] = field(default_factory=queue.Queue)
    frames: list[ConnectRequest] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    ended: bool = False

    def wait(self, wanted: Callable[[ConnectRequest], bool]) -> ConnectRequest:
        """The first frame that is wanted, as soon as it is there."""
        found: list[ConnectRequest] = []

        def look() -> bool:
            found.extend(frame for frame in self.frames if wanted(frame))
            return bool(found)

        with self.arrived:
            assert self.arrived.wait_for(look, TIMEOUT_S), [f.WhichOneof("frame") for f in self.frames]
        return found[0]

    def send(self, command: CommandSpec, *, epoch: int | None = None, cancel: bool = False) -> None:
        """Sends a command."""
        frame = CommandFrame(epoch=self.epoch if epoch is None else epoch, command=command, cancel=cancel)
        self.down.put(ConnectResponse(command=frame))

    def outcome(self, command_id: str) -> CommandUpdate:
        """The terminal update of a command."""
        return self.wait(
            lambda frame: (
                frame.HasField("command_update")
                and frame.command_update.command_id == command_id
                and frame.command_update.state in TERMINAL
            )
        ).command_update

    def run(self, command_id: str, workload_id: str, **operation: object) -> CommandUpdate:
        """Sends a command with one operation and waits for its outcome."""
        self.send(make_command(command_id, workload_id, **operation))
        return self.outcome(command_id)

    def acknowledge(self, command_id: str) -> None:
        """Acknowledges an outcome."""
        self.down.put(ConnectResponse(command_ack=CommandAck(command_id=command_id)))

    def end(self) -> None:
        """Ends the stream without a goodbye."""
        self.down.put(None)


def make_command(command_id: str, workload_id: str, **operation: object) -> CommandSpec:
    """A command with one operation, given by its field's name."""
    return CommandSpec(
        command_id=command_id,
        workload_id=workload_id,
        timeout=duration_pb2.Duration(seconds=60),
        operation=operation_pb2.Operation(**operation),  # type: ignore[arg-type]  # a field by name
    )


def timestamp(offset_s: float) -> timestamp_pb2.Timestamp:
    """The time of a clock with this offset, also beyond the years of a timestamp."""
    return timestamp_pb2.Timestamp(seconds=min(int(time.time() + offset_s), 2**63 - 1))


def _serialize(frame: ConnectResponse | bytes) -> bytes:
    """A frame, or bytes of a test's choice."""
    return frame if isinstance(frame, bytes) else frame.SerializeToString()


class ScriptedCoordinator:
    """Welcomes every worker and hands its session to the test."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.sessions: queue.Queue[Session] = queue.Queue()
        self.welcomes_major = 1
        self.load_interval_s = 5.0
        self.clock_offset_s: float | None = None
        """Offset of its clock. None: it tells no time."""
        self.first_answer: ConnectResponse | None = None
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(
            self.Connect, request_deserializer=ConnectRequest.FromString, response_serializer=_serialize
        )
        service = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
        methods = grpc.method_handlers_generic_handler(service, {"Connect": handler})
        self._server.add_generic_rpc_handlers((methods,))
        self.address = f"127.0.0.1:{self._server.add_secure_port(address, server_credentials())}"
        self._server.start()

    def next_session(self) -> Session:
        """The next worker's session, after its welcome."""
        return self.sessions.get(timeout=TIMEOUT_S)

    def stop(self) -> None:
        """Ends all streams."""
        self._server.stop(None).wait(10)

    def Connect(
        self,
        request_iterator: Iterator[ConnectRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[ConnectResponse | bytes]:
        first = next(request_iterator)
        assert first.WhichOneof("frame") == "hello"
        session = Session(first.hello, first.hello.last_epoch + 1)
        reader = threading.Thread(target=self._read, args=(session, request_iterator), daemon=True)
        reader.start()
        if self.first_answer is not None:
            yield self.first_answer
        yield ConnectResponse(
            welcome=Welcome(
                session_id=f"session-{session.epoch}",
                epoch=session.epoch,
                protocol_version=ProtocolVersion(major=self.welcomes_major),
                load_interval=duration_pb2.Duration(
                    nanos=round(self.load_interval_s * 1e9) % 10**9, seconds=int(self.load_interval_s)
                ),
                silence_limit=duration_pb2.Duration(seconds=60),
                time=None if self.clock_offset_s is None else timestamp(self.clock_offset_s),
            )
        )
        self.sessions.put(session)
        while context.is_active():
            try:
                frame = session.down.get(timeout=0.2)
            except queue.Empty:
                continue
            if frame is None:
                return
            yield frame

    def _read(self, session: Session, frames: Iterator[ConnectRequest]) -> None:
        try:
            for frame in frames:
                with session.arrived:
                    session.frames.append(frame)
                    session.arrived.notify_all()
                if frame.HasField("goodbye"):
                    session.end()
        except grpc.RpcError:
            pass
        with session.arrived:
            session.ended = True
            session.arrived.notify_all()


def is_goodbye(reason: session_pb2.GoodbyeReason.ValueType) -> Callable[[ConnectRequest], bool]:
    """Whether a frame is a goodbye for this reason."""
    return lambda frame: frame.HasField("goodbye") and frame.goodbye.reason == reason
