"""Recorded frames of an older coordinator, replayed to the present worker."""

import os
import queue
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold_simgpu import SimulatedHost, Timing

from tests.channels import server_credentials
from tests.prefork import WORKER, Forked
from tests.wire.facts import facts
from tests.wire.names import Names
from tests.wire.program import write_counter
from tests.wire.recording import CONNECT, GPU_COUNT, GPU_SEED, Event, Kind, load
from tests.worker.conftest import end_leftovers

TIMEOUT_S: Final = 30

WITHOUT: Final = (
    *("pid", "root_pid", "start_time_ticks", "duration", "phases", "estimate", "available_bytes"),
    *("data", "boot_id", "instance_id", "host", "resources", "capabilities", "protocol_version", "steps"),
    "warnings",
)
"""Fields that the host, the programs of a run and the release decide."""


class Session:
    """A session of the worker with the recorded coordinator, byte by byte."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self.down: queue.Queue[bytes | None] = queue.Queue()
        self._frames: list[ConnectRequest] = []
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, args=(frames,), daemon=True).start()

    def _read(self, frames: Iterator[bytes]) -> None:
        try:
            for frame in frames:
                with self._arrived:
                    self._frames.append(ConnectRequest.FromString(frame))
                    self._arrived.notify_all()
        except grpc.RpcError:
            pass

    def take(self, wanted: Callable[[ConnectRequest], bool]) -> ConnectRequest:
        """Waits for the first frame that is wanted, and takes it out."""

        def found() -> ConnectRequest | None:
            return next((frame for frame in self._frames if wanted(frame)), None)

        with self._arrived:
            assert self._arrived.wait_for(found, TIMEOUT_S), self._frames
            frame = found()
            assert frame is not None
            self._frames.remove(frame)
            return frame


class OlderCoordinator:
    """A server that hands each session to the test."""

    def __init__(self) -> None:
        self.sessions: queue.Queue[Session] = queue.Queue()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        connect: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._connect)
        service, _, method = CONNECT.removeprefix("/").partition("/")
        handler = grpc.method_handlers_generic_handler(service, {method: connect})
        self._server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', server_credentials())}"
        self._server.start()

    def _connect(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        session = Session(frames)
        context.add_callback(lambda: session.down.put(None))
        self.sessions.put(session)
        yield from iter(session.down.get, None)

    def stop(self) -> None:
        """Ends all sessions."""
        self._server.stop(None).wait(10)


class Replay:
    """The recorded events in their order. Each frame of the worker must have the recorded facts.

    The number and the times of loads and of progress differ from run to run, and are not compared.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._coordinator = OlderCoordinator()
        self._names = Names()
        self._added: Counter[str] = Counter()
        """How much greater generations are than the recorded ones, by workload."""
        self._session: Session | None = None
        self._worker: subprocess.Popen[str] | None = None
        host = SimulatedHost.create(
            folder / "host", gpus=GPU_COUNT, chip="H100", timing=Timing.instant(), seed=GPU_SEED
        )
        search_path = f"{write_counter(folder)}{os.pathsep}{os.environ['PATH']}"
        self._variables = {**os.environ, **host.environment(), "PATH": search_path}

    def play(self, events: list[Event]) -> None:
        """Plays all events."""
        try:
            for event in events:
                self._play(event)
        finally:
            self._coordinator.stop()
            if self._worker is not None and self._worker.poll() is None:
                self._worker.kill()
                self._worker.wait(TIMEOUT_S)
            end_leftovers(self._folder / "state")

    def log(self) -> str:
        """The log of the worker."""
        return (self._folder / "worker.log").read_text()

    def _play(self, event: Event) -> None:
        match event.kind:
            case Kind.CONNECT:
                self._start()
            case Kind.DOWN:
                assert self._session is not None
                self._session.down.put(self._names.replaced(event.content))
            case Kind.UP:
                self._expect(event.content)
            case Kind.PAUSE | Kind.REQUEST | Kind.RESPONSE | Kind.REFUSAL:
                pass  # those of a client

    def _start(self) -> None:
        options = {
            "coordinator": self._coordinator.address,
            "state-dir": str(self._folder / "state"),
            "name": "alpha",
            "stop-workloads": "leave",
        }
        with (self._folder / "worker.log").open("a") as log:
            self._worker = Forked(
                WORKER,
                [f"--{name}={value}" for name, value in options.items()],
                stdout=log,
                stderr=log,
                env=self._variables,
            )
        self._session = self._coordinator.sessions.get(timeout=TIMEOUT_S)

    def _expect(self, content: bytes) -> None:
        """Waits for the frame that stands for a recorded one."""
        assert self._session is not None
        assert self._worker is not None
        recorded = self._shifted(ConnectRequest.FromString(content))
        key = self._key(recorded)
        if key is None:
            return
        if recorded.HasField("goodbye"):
            self._worker.send_signal(signal.SIGTERM)
        frame = self._session.take(lambda frame: self._key(frame) == key)
        self._names.learn(recorded, frame)
        before = {one.workload_id: one.status.generation for one in recorded.hello.workloads}
        for one in frame.hello.workloads:
            self._added[one.workload_id] += one.status.generation - before[one.workload_id]
        expected = self._shifted(ConnectRequest.FromString(self._names.replaced(content)))
        for check in expected.plan_answer.plan.checks:  # the older release's words
            if check.name == "state":
                check.detail = check.detail.replace("is running", "is RUNNING")
        if expected.command_update.HasField("error"):
            error = expected.command_update.error
            error.message = error.message.replace("`leasehold suspend -", "`leasehold suspend two -")
        warnings, recorded_ones = (one.command_update.result.warnings for one in (frame, expected))
        assert bool(warnings) == bool(recorded_ones), warnings
        assert facts(frame, WITHOUT) == facts(expected, WITHOUT)
        if recorded.HasField("goodbye"):
            self._session.down.put(None)
            assert self._worker.wait(TIMEOUT_S) == 0

    def _shifted(self, frame: ConnectRequest) -> ConnectRequest:
        """A recorded frame with the generations of this run, which begin at the clock after a start."""
        of_event = [frame.workload_event.workload] if frame.HasField("workload_event") else []
        for one in (*frame.hello.workloads, *frame.command_update.workloads, *of_event):
            one.status.generation += self._added[one.workload_id]
        return frame

    def _key(self, frame: ConnectRequest) -> tuple[Any, ...] | None:
        """What tells a frame from others. None: a frame that is not compared."""
        match kind := frame.WhichOneof("frame"):
            case "command_update":
                update = frame.command_update
                return None if update.phase else (kind, update.command_id, update.state)
            case "workload_event":
                workload = frame.workload_event.workload
                return kind, workload.workload_id, workload.status.generation
            case "plan_answer":
                return kind, frame.plan_answer.plan_id
            case "checkpoint_answer":
                return kind, frame.checkpoint_answer.query_id
            case "output_chunk":
                return kind, frame.output_chunk.read_id
            case "hello" | "goodbye":
                return (kind,)
        return None


@pytest.mark.long
def test_an_older_coordinator_is_served_as_before(tmp_path: Path) -> None:
    replay = Replay(tmp_path)
    replay.play(load())
    assert "Traceback" not in replay.log()
