"""The worker's side of a session: who it talks to, what it refuses, and how it comes back."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.operation_pb2 import RunOperation, StopOperation
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    ConnectResponse,
    Drain,
    Goodbye,
    Heartbeat,
    OutputChunk,
    ReadOutput,
    Welcome,
)
from leasehold_client.local.worker import LocalWorker
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.session.grpc_bridge import INBOX_LIMIT, SessionEndError, start_reader
from leasehold_worker.timestamps import LONGEST_S

from tests.worker.conftest import WorkerProcess
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, is_goodbye, make_command

Start = Callable[..., WorkerProcess]
PROTOCOL_ERROR = session_pb2.GOODBYE_REASON_PROTOCOL_ERROR
REFUSED = session_pb2.GOODBYE_REASON_REFUSED
SLEEPER = workload_pb2.WorkloadSpec(arguments=["sleep", "300"])


def goodbye(session: Session, reason: session_pb2.GoodbyeReason.ValueType) -> Goodbye:
    """The worker's goodbye for this reason."""
    return session.wait(is_goodbye(reason)).goodbye


def test_a_second_welcome_ends_the_session_with_its_reason(
    start_worker: Start, coordinator: ScriptedCoordinator
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    session.down.put(ConnectResponse(welcome=Welcome(epoch=99)))
    error = goodbye(session, PROTOCOL_ERROR).error
    assert error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    assert "welcome came twice" in error.message


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff\xff\xff", marks=pytest.mark.long),
        pytest.param(b"\x0a\x7f", marks=pytest.mark.long),
        b"no frame at all",
    ],
)
def test_bytes_that_are_no_frame_end_the_session_with_a_typed_goodbye(
    start_worker: Start, coordinator: ScriptedCoordinator, data: bytes
) -> None:
    worker = start_worker(None)
    session = coordinator.next_session()
    session.down.put(data)
    assert goodbye(session, PROTOCOL_ERROR).error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    assert worker.process.poll() is None


@pytest.mark.parametrize("command_id", ["local-1", "c" * 129], ids=["reserved", "long"])
@pytest.mark.parametrize("acknowledged", [False, True], ids=["command", "acknowledgement"])
def test_a_command_id_that_no_coordinator_may_choose_ends_the_session(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path, command_id: str, acknowledged: bool
) -> None:
    """The worker's own commands pass the limit of eight, and run while the worker stops."""
    worker = start_worker(None)
    session = coordinator.next_session()
    if acknowledged:
        session.acknowledge(command_id)
    else:
        session.send(make_command(command_id, "w1", run=RunOperation(name="w1", spec=SLEEPER)))
    error = goodbye(session, PROTOCOL_ERROR).error
    assert error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    assert command_id[:100] in error.message
    assert not (tmp_path / "state/workloads/w1").exists()
    assert worker.process.poll() is None


def test_another_major_version_is_refused_and_both_are_named(
    start_worker: Start, coordinator: ScriptedCoordinator
) -> None:
    coordinator.welcomes_major = 2
    start_worker(None)
    error = goodbye(coordinator.next_session(), REFUSED).error
    assert error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VERSION
    assert error.metadata["coordinator"] == "2.0"
    assert error.metadata["worker"].startswith("1.")


@pytest.mark.parametrize("epoch", [0, pytest.param(2**62, marks=pytest.mark.long)])
def test_a_coordinator_with_an_impossible_epoch_is_refused(
    start_worker: Start, coordinator: ScriptedCoordinator, epoch: int
) -> None:
    coordinator.first_answer = ConnectResponse(
        welcome=Welcome(epoch=epoch, protocol_version=session_pb2.ProtocolVersion(major=1), session_id="s")
    )
    start_worker(None)
    error = goodbye(coordinator.next_session(), REFUSED).error
    assert error.reason == errors_pb2.ERROR_REASON_STALE_EPOCH


def test_frames_of_a_newer_coordinator_are_ignored(
    start_worker: Start, coordinator: ScriptedCoordinator
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    session.down.put(ConnectResponse())
    unknown = Heartbeat.FromString(b"\x7a\x02hi" + Heartbeat(applied_load_sequence=1).SerializeToString())
    session.down.put(ConnectResponse(heartbeat=unknown))
    assert session.run("c1", "w1", run=RunOperation(name="one", spec=SLEEPER)).state


def test_a_drained_worker_comes_back_later(start_worker: Start, coordinator: ScriptedCoordinator) -> None:
    start_worker(None)
    session = coordinator.next_session()
    session.run("c1", "w1", run=RunOperation(name="one", spec=SLEEPER))
    session.down.put(ConnectResponse(drain=Drain(reconnect_after=duration_pb2.Duration(nanos=10_000_000))))
    again = coordinator.next_session()
    assert again.epoch == session.epoch + 1
    assert [workload.name for workload in again.hello.workloads] == ["one"]


def test_a_command_of_an_older_session_is_not_obeyed(
    start_worker: Start, coordinator: ScriptedCoordinator
) -> None:
    start_worker(None)
    first = coordinator.next_session()
    first.end()
    second = coordinator.next_session()
    command = make_command("c1", "w1", run=RunOperation(name="one", spec=SLEEPER))
    second.send(command, epoch=first.epoch)
    assert second.outcome("c1").error.reason == errors_pb2.ERROR_REASON_STALE_EPOCH
    third = make_command("c2", "w1", run=RunOperation(name="one", spec=SLEEPER))
    second.send(third)
    assert second.outcome("c2").state == command_pb2.COMMAND_STATE_SUCCEEDED


def test_hello_comes_again_when_the_inventory_changes(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    host = SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())
    coordinator.load_interval_s = 0.1
    start_worker(host)
    session = coordinator.next_session()
    host.set_readings(1, mig_enabled=1)
    hello = session.wait(lambda frame: any(gpu.mig_enabled for gpu in frame.hello.gpus)).hello
    assert hello.instance_id == session.hello.instance_id
    assert {c.name: c.available for c in hello.capabilities}["cuda_suspend"] is False


def test_a_heartbeat_changes_the_load_interval_at_once(
    start_worker: Start, coordinator: ScriptedCoordinator
) -> None:
    coordinator.load_interval_s = 3600
    start_worker(None)
    session = coordinator.next_session()
    beat = Heartbeat(
        load_interval=duration_pb2.Duration(nanos=50_000_000),
        silence_limit=duration_pb2.Duration(seconds=600),
    )
    session.down.put(ConnectResponse(heartbeat=beat))
    session.wait(lambda frame: frame.worker_load.sequence > 2)
    beat.load_interval.seconds = 10**9
    session.down.put(ConnectResponse(heartbeat=beat))
    session.wait(is_goodbye(session_pb2.GOODBYE_REASON_PROTOCOL_ERROR))


@pytest.mark.parametrize(
    "frame",
    [
        ConnectResponse(goodbye=Goodbye(reason=99)),  # type: ignore[arg-type]  # of a newer coordinator
        pytest.param(
            ConnectResponse(drain=Drain(reconnect_after=duration_pb2.Duration(seconds=-5))),
            marks=pytest.mark.long,
        ),
    ],
    ids=["unknown goodbye", "drain that is over"],
)
def test_a_frame_ends_no_more_than_its_session(
    start_worker: Start, coordinator: ScriptedCoordinator, frame: ConnectResponse
) -> None:
    start_worker(None)
    coordinator.next_session().down.put(frame)
    coordinator.next_session()


@pytest.mark.parametrize(
    "durations",
    [
        pytest.param({"load_interval": duration_pb2.Duration(seconds=-1)}, marks=pytest.mark.long),
        {"load_interval": duration_pb2.Duration()},
        pytest.param({"load_interval": duration_pb2.Duration(seconds=10**12)}, marks=pytest.mark.long),
        {"silence_limit": duration_pb2.Duration(seconds=-1)},
        pytest.param({"silence_limit": duration_pb2.Duration(seconds=2**63 - 1)}, marks=pytest.mark.long),
    ],
    ids=["negative interval", "no interval", "huge interval", "negative limit", "huge limit"],
)
def test_a_welcome_with_impossible_times_is_refused(
    start_worker: Start, coordinator: ScriptedCoordinator, durations: dict[str, duration_pb2.Duration]
) -> None:
    welcome = Welcome(
        epoch=1,
        protocol_version=session_pb2.ProtocolVersion(major=1),
        session_id="s",
        load_interval=durations.get("load_interval", duration_pb2.Duration(seconds=5)),
        silence_limit=durations.get("silence_limit", duration_pb2.Duration(seconds=9)),
    )
    coordinator.first_answer = ConnectResponse(welcome=welcome)
    start_worker(None)
    error = goodbye(coordinator.next_session(), PROTOCOL_ERROR).error
    assert error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    ("told_s", "expected_s"),
    [(None, None), (0.0, 0.0), (3_600.0, 3_600.0), (-3_600.0, -3_600.0), (1e19, LONGEST_S)],
    ids=["no time", "right", "ahead", "behind", "beyond all years"],
)
def test_the_offset_of_the_coordinators_clock_is_kept(
    start_worker: Start,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
    told_s: float | None,
    expected_s: float | None,
) -> None:
    coordinator.clock_offset_s = told_s
    worker = start_worker(None)
    session = coordinator.next_session()
    session.run("c1", "w1", run=RunOperation(name="one", spec=SLEEPER))
    with LocalWorker(tmp_path / "state/worker.sock") as local:
        found = local.list()
    is_told = found.HasField("coordinator_clock_offset")
    offset = found.coordinator_clock_offset
    assert is_told == (expected_s is not None)
    # A timestamp of the scripted coordinator has whole seconds.
    assert math.isclose(offset.seconds + offset.nanos / 1e9, expected_s or 0.0, abs_tol=2.0)
    is_warned = "s ahead of this host's" in worker.log.read_text() or "s behind" in worker.log.read_text()
    assert is_warned == (abs(expected_s or 0.0) > 5)


@pytest.mark.long
def test_an_offset_beyond_every_file_is_refused_alone(
    start_worker: Start, coordinator: ScriptedCoordinator
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    session.run("c1", "w1", run=RunOperation(name="one", spec=SLEEPER))
    for offset in (2**62, 2**63 - 1, -(2**63)):
        chunk = read_at(session, "w1", offset)
        expected = errors_pb2.ERROR_REASON_INVALID_ARGUMENT if abs(offset) > 2**62 else 0
        assert (chunk.error.reason, chunk.data) == (expected, b"")
    assert not session.ended


def read_at(session: Session, workload_id: str, offset: int) -> OutputChunk:
    read = ReadOutput(read_id=str(offset), workload_id=workload_id, offset=offset)
    session.down.put(ConnectResponse(read_output=read))
    return session.wait(lambda frame: frame.output_chunk.read_id == read.read_id).output_chunk


@pytest.mark.parametrize(
    "seconds",
    [-(2**63), pytest.param(-1, marks=pytest.mark.long), pytest.param(2**63 - 1, marks=pytest.mark.long)],
)
def test_any_duration_of_a_command_ends_no_more_than_that(
    start_worker: Start, coordinator: ScriptedCoordinator, seconds: int
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    session.run("c1", "w1", run=RunOperation(name="one", spec=SLEEPER))
    odd = duration_pb2.Duration(seconds=seconds)
    command = make_command("c2", "w1", stop=StopOperation(grace=odd))
    command.timeout.CopyFrom(odd)
    session.send(command)
    assert session.outcome("c2").state == command_pb2.COMMAND_STATE_SUCCEEDED
    assert not session.ended


class Flood:
    """A call whose other side sends more than anybody reads, until it is cancelled."""

    def __init__(self) -> None:
        self.sent = 0
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[ConnectResponse | bytes]:
        for self.sent in range(1, 3 * INBOX_LIMIT + 1):
            yield ConnectResponse(heartbeat=Heartbeat())
        self.cancelled.wait()

    def cancel(self) -> bool:
        self.cancelled.set()
        return True


async def test_what_waits_for_a_slow_worker_is_bounded_and_nothing_is_lost() -> None:
    call = Flood()
    async with trio.open_nursery() as nursery:
        frames = start_reader(nursery, call)
        with trio.fail_after(10):
            while frames.statistics().tasks_waiting_send == 0:  # noqa: ASYNC110
                await trio.sleep(0.001)
            assert frames.statistics().current_buffer_used == INBOX_LIMIT
            assert call.sent == INBOX_LIMIT + 1
            for _ in range(3 * INBOX_LIMIT):
                assert isinstance(await frames.receive(), ConnectResponse)
            call.cancel()
            assert isinstance(await frames.receive(), SessionEndError)


async def test_a_flood_that_nobody_reads_holds_up_no_end() -> None:
    call = Flood()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            frames = start_reader(nursery, call)
            while frames.statistics().tasks_waiting_send == 0:  # noqa: ASYNC110
                await trio.sleep(0.001)
            call.cancel()
            frames.close()
