"""Holds of a worker process: who gets the GPUs that a suspend frees, also after `kill -9` of the worker."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import command_pb2, errors_pb2, eviction_pb2, lease_pb2, workload_pb2
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.operation_pb2 import ReleaseHoldOperation, RestoreOperation, RunOperation, SuspendOperation
from leasehold_simgpu import SimulatedHost, Timing

from tests.grids import grid
from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, counters, slots, until, wait_counting
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
FREE, LEASED, RESERVED = (
    lease_pb2.SLOT_STATE_FREE,
    lease_pb2.SLOT_STATE_LEASED,
    lease_pb2.SLOT_STATE_RESERVED,
)
SUSPENDED = workload_pb2.WORKLOAD_STATE_SUSPENDED
STOP = eviction_pb2.EvictionPolicy(process_strategy=eviction_pb2.PROCESS_STRATEGY_STOP)

Start = Callable[..., WorkerProcess]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())


@pytest.fixture
def queue(host: SimulatedHost, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Queues a `leasehold exec`, which writes a file once it has a GPU."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> Path:
        number = len(started)
        got, log = tmp_path / f"got{number}", tmp_path / f"exec{number}.log"
        environment = {
            **os.environ,
            **host.environment(),
            "LEASEHOLD_SOCKET": str(tmp_path / "state/worker.sock"),
        }
        command = ["leasehold", "exec", "--", "sh", "-c", f"echo got > {got}; exec sleep 1000"]
        with log.open("wb") as file:
            started.append(subprocess.Popen(command, env=environment, stderr=file, start_new_session=True))
        poll(lambda: "waiting" in log.read_text())
        return got

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hold_for(seconds: float = 300, **fields: object) -> SuspendOperation:
    duration = Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    return SuspendOperation(hold_for=duration, held_by="ann", **fields)  # type: ignore[arg-type]  # by name


def pool_is(session: Session, *states: int) -> list[GpuLease]:
    """The last load that shows these states."""
    frame = session.wait(lambda f: [gpu.state for gpu in f.worker_load.gpu_leases] == list(states))
    return list(frame.worker_load.gpu_leases)


def full_host(start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost) -> Session:
    """A worker whose two GPUs are leased to w1."""
    start_worker(host)
    session = coordinator.next_session()
    assert session.run("run", "w1", run=counter_run("one", 2)).state == SUCCEEDED
    wait_counting(session, "w1")
    return session


@pytest.mark.long
def test_a_waiting_exec_does_not_overtake_the_caller(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, queue: Callable[[], Path]
) -> None:
    session = full_host(start_worker, coordinator, host)
    got = queue()
    outcome = session.run("park", "w1", suspend=hold_for())
    assert outcome.state == SUCCEEDED, outcome.error
    assert outcome.result.hold_id == "park"
    assert len(outcome.result.released_gpu_uuids) == 2
    for gpu in pool_is(session, RESERVED, RESERVED):
        assert (gpu.hold.hold_id, list(gpu.hold.workload_ids), gpu.hold.held_by) == ("park", ["w1"], "ann")
        assert gpu.hold.expire_time.ToSeconds() - gpu.hold.create_time.ToSeconds() == 300
    refused = session.run("other", "w9", run=counter_run("nine"))
    assert refused.error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    named = session.run("named", "w9", run=counter_run("nine", gpu_uuids=[host.gpus[0].uuid]))
    assert named.error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    assert not got.exists()
    taken = session.run("take", "w2", run=counter_run("two", 2, hold_id="park"))
    assert taken.state == SUCCEEDED, taken.error
    wait_counting(session, "w2")
    assert not got.exists()
    again = session.run("again", "w3", run=counter_run("three", hold_id="park"))
    assert again.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_HOLD


@pytest.mark.long
def test_what_the_taker_does_not_need_serves_who_waits(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, queue: Callable[[], Path]
) -> None:
    session = full_host(start_worker, coordinator, host)
    got = queue()
    session.run("park", "w1", suspend=hold_for())
    assert session.run("take", "w2", run=counter_run("two", hold_id="park")).state == SUCCEEDED
    poll(got.exists)
    pool_is(session, LEASED, LEASED)


@pytest.mark.long
def test_the_expiry_serves_who_waits(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, queue: Callable[[], Path]
) -> None:
    session = full_host(start_worker, coordinator, host)
    got = queue()
    session.run("park", "w1", suspend=hold_for(0.5))
    poll(got.exists)
    late = session.run("late", "w2", run=counter_run("two", hold_id="park"))
    assert late.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_HOLD


@pytest.mark.long
def test_a_hold_that_is_given_up_serves_who_waits(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, queue: Callable[[], Path]
) -> None:
    session = full_host(start_worker, coordinator, host)
    got = queue()
    session.run("park", "w1", suspend=hold_for())
    assert session.run("give", "", release_hold=ReleaseHoldOperation(hold_id="park")).state == SUCCEEDED
    poll(got.exists)
    twice = session.run("twice", "", release_hold=ReleaseHoldOperation(hold_id="park"))
    assert twice.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_HOLD


@pytest.mark.long
def test_a_run_that_fails_leaves_the_hold_for_another_attempt(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, queue: Callable[[], Path]
) -> None:
    session = full_host(start_worker, coordinator, host)
    got = queue()
    session.run("park", "w1", suspend=hold_for())
    spec = workload_pb2.WorkloadSpec(
        arguments=["/no/such/program"], resources=workload_pb2.Resources(gpu_count=1)
    )
    failed = session.run("wrong", "w2", run=RunOperation(name="two", spec=spec, hold_id="park"))
    assert failed.error.reason == errors_pb2.ERROR_REASON_SPAWN_FAILED
    pool_is(session, RESERVED, RESERVED)
    back = session.run("back", "w1", restore=RestoreOperation(hold_id="park"))
    assert back.state == SUCCEEDED, back.error
    wait_counting(session, "w1")
    assert not got.exists()


@pytest.mark.long
@pytest.mark.parametrize("policy", [None, pytest.param(STOP, marks=pytest.mark.long)])
def test_a_restore_takes_a_hold_too(
    start_worker: Start,
    coordinator: ScriptedCoordinator,
    host: SimulatedHost,
    queue: Callable[[], Path],
    policy: eviction_pb2.EvictionPolicy | None,
) -> None:
    """Another workload is parked first, and comes back on the GPUs that the suspend of w1 frees."""
    start_worker(host)
    session = coordinator.next_session()
    session.run("run2", "w2", run=counter_run("two"))
    wait_counting(session, "w2")
    session.run("park2", "w2", suspend=SuspendOperation(policy=policy, force=True))
    session.run("run1", "w1", run=counter_run("one", 2))
    wait_counting(session, "w1")
    got = queue()
    session.run("park1", "w1", suspend=hold_for())
    restored = session.run("back", "w2", restore=RestoreOperation(hold_id="park1"))
    assert restored.state == SUCCEEDED, restored.error
    wait_counting(session, "w2")
    poll(got.exists)  # on the other GPU


@pytest.mark.long
def test_a_suspend_that_frees_nothing_makes_no_hold(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost
) -> None:
    session = full_host(start_worker, coordinator, host)
    session.run("park", "w1", suspend=SuspendOperation())
    again = session.run("again", "w1", suspend=hold_for())
    assert again.result.already_there
    assert not again.result.HasField("hold_id")
    too_long = session.run("long", "w1", suspend=hold_for(601))
    assert too_long.error.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    pool_is(session, FREE, FREE)


@pytest.mark.long
@pytest.mark.parametrize(
    "crash_point",
    grid(
        (
            "command-journaled:2",
            "intent-checkpoint",
            "phase-verify",
            "operation-ended:2",
            "outcome-journaled:2",
        ),
        "phase-verify",
    ),
)
def test_a_hold_survives_the_worker_wherever_the_suspend_is_killed(
    start_worker: Start,
    coordinator: ScriptedCoordinator,
    host: SimulatedHost,
    crash_point: str,
) -> None:
    doomed = start_worker(host, crash_point=crash_point)
    session = coordinator.next_session()
    session.run("run", "w1", run=counter_run("one", 2))
    wait_counting(session, "w1")
    session.acknowledge("run")
    command = make_command("park", "w1", suspend=hold_for())
    session.send(command)
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    again.send(command)
    outcome = again.outcome("park")
    if outcome.state != SUCCEEDED:  # it was rolled back by the next start
        assert outcome.error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
        assert not outcome.result.HasField("hold_id")
        pool_is(again, LEASED, LEASED)
        return
    assert outcome.result.hold_id == "park"
    for gpu in pool_is(again, RESERVED, RESERVED):
        assert gpu.hold.hold_id == "park"
    assert again.run("take", "w2", run=counter_run("two", 2, hold_id="park")).state == SUCCEEDED
    wait_counting(again, "w2")


@pytest.mark.long
def test_a_hold_keeps_its_end_over_a_restart_and_serves_who_waits_then(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, queue: Callable[[], Path]
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    session.run("run", "w1", run=counter_run("one", 2))
    wait_counting(session, "w1")
    session.run("park", "w1", suspend=hold_for(6))
    (before, _) = pool_is(session, RESERVED, RESERVED)
    worker.kill()
    start_worker(host)
    again = coordinator.next_session()
    assert slots(again) == [RESERVED, RESERVED]
    assert again.hello.gpu_leases[0].hold == before.hold
    got = queue()
    poll(got.exists)
    assert time.time() >= before.hold.expire_time.ToNanoseconds() / 1e9
    pool_is(again, LEASED, FREE)


@pytest.mark.long
@pytest.mark.parametrize(
    "crash_point",
    grid(
        (
            "command-journaled:3",
            "intent-run:2",
            "program-started:2",
            "operation-ended:3",
            "outcome-journaled:3",
        ),
        "intent-run:2",
    ),
)
def test_a_taken_hold_is_used_or_whole_wherever_the_run_is_killed(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, crash_point: str
) -> None:
    doomed = start_worker(host, crash_point=crash_point)
    session = coordinator.next_session()
    session.run("run", "w1", run=counter_run("one", 2))
    wait_counting(session, "w1")
    session.run("park", "w1", suspend=hold_for())
    command = make_command("take", "w2", run=counter_run("two", hold_id="park"))
    session.send(command)
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    again.send(command)
    outcome = again.outcome("take")
    if outcome.state == SUCCEEDED:
        wait_counting(again, "w2")
        pool_is(again, LEASED, FREE)
        return
    assert outcome.error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    pool_is(again, RESERVED, RESERVED)
    assert again.run("retry", "w3", run=counter_run("three", 2, hold_id="park")).state == SUCCEEDED


@pytest.mark.long
@pytest.mark.parametrize(
    "crash_point",
    ["intent-restore", "phase-restore", "phase-unlock", "operation-ended:3"],
)
def test_a_taken_hold_is_used_or_whole_wherever_the_restore_is_killed(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, crash_point: str
) -> None:
    doomed = start_worker(host, crash_point=crash_point)
    session = coordinator.next_session()
    session.run("run", "w1", run=counter_run("one", 2))
    wait_counting(session, "w1")
    session.run("park", "w1", suspend=hold_for())
    command = make_command("back", "w1", restore=RestoreOperation(hold_id="park"))
    session.send(command)
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    again.send(command)
    outcome = again.outcome("back")
    if outcome.state == SUCCEEDED:
        wait_counting(again, "w1")
        pool_is(again, LEASED, LEASED)
    else:
        pool_is(again, RESERVED, RESERVED)
        until(again, "w1", SUSPENDED)
        assert again.run("retry", "w1", restore=RestoreOperation(hold_id="park")).state == SUCCEEDED
    assert len(counters(host)) == 1
