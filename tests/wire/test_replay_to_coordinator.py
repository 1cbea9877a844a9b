"""Recorded frames of an older worker and calls of an older client, replayed to the present coordinator."""

import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from google.rpc import status_pb2
from leasehold.v1.event_service_pb2 import ListEventsResponse
from leasehold.worker.v1.session_pb2 import ConnectResponse

from tests.channels import open_worker_channel
from tests.coordinator.conftest import CoordinatorProcess
from tests.wire.facts import facts
from tests.wire.names import Names
from tests.wire.recording import CONNECT, Event, Kind, load, status_of

DEADLINE_S: Final = 30.0
READS: Final = ("Get", "List")
"""Begins of methods that change nothing. They are repeated until they see the frames before them."""

NOT_RECORDED: Final = ("coordinator_version", "protocol_version", "load_interval", "silence_limit")
"""Fields of frames that the release decides, or the load interval."""

CORDON: Final = re.compile(r"^((?:un)?cordon|reset gpu health) of (worker )?\S+(?= is )")
"""The begin of the message of such a command, with its target."""

BY_COMMAND: Final = re.compile(r", by command \S+$")
"""The end of the message of a workload that a command of another workload changed."""

LOAD_INTERVAL_S: Final = 60.0
"""On a busy machine, the recorded worker is silent for longer than in the recording, which does no harm."""


class Session:
    """The stream of the recorded worker, byte by byte."""

    def __init__(self, address: str) -> None:
        self.frames: list[ConnectResponse] = []
        self._up: queue.Queue[bytes | None] = queue.Queue()
        self._channel = cast(Any, open_worker_channel(address))  # gRPC's types know no bytes
        self._call = self._channel.stream_stream(CONNECT)(iter(self._up.get, None))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            for frame in self._call:
                self.frames.append(ConnectResponse.FromString(frame))
        except grpc.RpcError:
            pass

    def send(self, frame: bytes) -> None:
        """Sends a frame."""
        self._up.put(frame)

    def close(self) -> None:
        """Ends the stream."""
        self._up.put(None)
        self._call.cancel()
        self._reader.join(DEADLINE_S)
        self._channel.close()


class Call:
    """A call of the recorded client."""

    def __init__(
        self, channel: grpc.Channel, event: Event, request: bytes, threads: ThreadPoolExecutor
    ) -> None:
        method = descriptor_pool.Default().FindMethodByName(event.method.removeprefix("/").replace("/", "."))
        self.type = message_factory.GetMessageClass(method.output_type)
        self.responses: list[Message] = []
        self.refusal: status_pb2.Status | None = None
        self.is_read = method.name.startswith(READS)
        make: Callable[..., Any] = channel.unary_stream if method.server_streaming else channel.unary_unary
        self._make = partial(make(event.method), request, timeout=DEADLINE_S)
        self._is_stream = method.server_streaming
        self.done: Future[None] = threads.submit(self._run)

    def _run(self) -> None:
        try:
            answers: Iterator[bytes] = self._make() if self._is_stream else iter([self._make()])
            for answer in answers:
                self.responses.append(self.type.FromString(answer))
        except grpc.RpcError as error:
            self.refusal = status_pb2.Status.FromString(status_of(error))

    def repeat(self) -> None:
        """Makes the call again."""
        self.responses.clear()
        self._run()


def eventually(condition: Callable[[], bool], told: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


class Replay:
    """The recorded events in their order. Each answer of the coordinator must have the recorded facts."""

    def __init__(self, coordinator: CoordinatorProcess, threads: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._threads = threads
        self._names = Names()
        self._sessions: list[Session] = []
        self._is_settled = False
        self._calls: dict[int, Call] = {}

    def play(self, events: list[Event]) -> None:
        """Plays all events."""
        last = {event.call: event for event in events if event.kind is Kind.RESPONSE}
        try:
            for event in events:
                if event.kind is not Kind.RESPONSE or last[event.call] is event:
                    self._play(event)
        finally:
            for session in self._sessions:
                session.close()

    def _play(self, event: Event) -> None:
        content = self._names.replaced(event.content)
        self._is_settled &= event.kind not in (Kind.CONNECT, Kind.UP, Kind.DOWN)
        match event.kind:
            case Kind.PAUSE:
                self._is_settled = True
            case Kind.CONNECT:
                self._sessions.append(Session(self._coordinator.worker_address))
            case Kind.UP:
                self._sessions[-1].send(content)
            case Kind.DOWN:
                self._expect_frame(event.content)
            case Kind.REQUEST:
                call = self._calls[event.call] = Call(
                    self._coordinator.channel, event, content, self._threads
                )
                self._is_settled &= call.is_read
            case Kind.RESPONSE:
                self._expect_response(self._calls[event.call], event.content)
            case Kind.REFUSAL:
                call = self._calls[event.call]
                call.done.result(DEADLINE_S)
                assert call.refusal == status_pb2.Status.FromString(content)

    def _expect_frame(self, content: bytes) -> None:
        """Waits for a frame with the facts of a recorded one. Frames keep their order, besides heartbeats."""
        recorded = ConnectResponse.FromString(content)
        kind = recorded.WhichOneof("frame")
        if kind == "heartbeat":
            return
        session = self._sessions[-1]

        def found() -> list[ConnectResponse]:
            return [frame for frame in session.frames if frame.WhichOneof("frame") != "heartbeat"]

        eventually(lambda: bool(found()), lambda: recorded)
        frame = found()[0]
        session.frames.remove(frame)
        self._names.learn(recorded, frame)
        expected = ConnectResponse.FromString(self._names.replaced(content))
        assert facts(frame, NOT_RECORDED) == facts(expected, NOT_RECORDED)
        assert kind != "welcome" or frame.welcome.load_interval.seconds == LOAD_INTERVAL_S

    def _expect_response(self, call: Call, content: bytes) -> None:
        """Waits for a response with the facts of a recorded one.

        A read that was recorded while frames were on their way may have seen them or not.
        """
        if call.is_read and not self._is_settled:
            eventually(lambda: bool(call.responses), lambda: call.refusal)
            return

        expected = _with_names(call.type.FromString(self._names.replaced(content)))

        def is_there() -> bool:
            nonlocal expected
            for response in call.responses[-1:]:
                if not call.is_read:
                    self._names.learn(call.type.FromString(content), response)
                    expected = _with_names(call.type.FromString(self._names.replaced(content)))
                if _in_order(response) == _in_order(expected):
                    return True
            if call.done.done() and call.is_read:
                call.repeat()
            return False

        def told() -> str:
            found = [_in_order(one) for one in call.responses]
            return f"{call.refusal}\nexpected: {_in_order(expected)}\nfound: {found}"

        eventually(is_there, told)


def _in_order(message: Message) -> Any:
    """The facts of a message. Events of one moment, such as an end and its command's, come in any order.

    The older release named the worker of a cordon of GPUs in its message, and the present one names the GPUs.
    """
    found = facts(message)
    if isinstance(message, ListEventsResponse):
        for one in found.get("events", ()):
            one["message"] = CORDON.sub(r"\1", one.get("message", ""))
            if one["kind"] == "EVENT_KIND_WORKLOAD_CHANGED":  # it had no command
                one["message"] = BY_COMMAND.sub("", one["message"])
                one.pop("command_id", None)
        found["events"] = sorted(found.get("events", ()), key=str)
    return found


def _with_names(message: Message) -> Message:
    """Names workloads of events. The older release told the id of one that ended before its command."""
    if isinstance(message, ListEventsResponse):
        events = message.events
        names = {one.workload_id: one.workload_name for one in events if one.workload_name != one.workload_id}
        for one in events:
            if one.workload_id and one.workload_name == one.workload_id:
                one.workload_name = names.get(one.workload_id, one.workload_id)
                one.message = one.message.replace(one.workload_id, one.workload_name)
    return message


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator on a fresh store, which lets its worker be silent."""
    started = CoordinatorProcess(tmp_path, load_interval_s=LOAD_INTERVAL_S)
    started.start()
    yield started
    assert started.end(signal.SIGTERM) == 0


def test_an_older_worker_and_an_older_client_are_served_as_before(coordinator: CoordinatorProcess) -> None:
    with ThreadPoolExecutor(8) as threads:
        Replay(coordinator, threads).play(load())
