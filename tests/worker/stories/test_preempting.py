"""Runs and restores that preempt: suspend these, then start that, all or nothing, also after `kill -9`."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, lease_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RestoreOperation, RunOperation, SuspendOperation
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.workloads.eviction import CUDA_SUSPEND, STOP

from tests.grids import grid
from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, counters, until, wait_counting
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command

SUCCEEDED, FAILED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED
FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED
RUNNING, SUSPENDED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_SUSPENDED

Start = Callable[..., WorkerProcess]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())


def start_two(coordinator: ScriptedCoordinator) -> Session:
    """The session of a worker on whose two GPUs w1 and w2 count."""
    session = coordinator.next_session()
    for number in (1, 2):
        assert session.run(f"run{number}", f"w{number}", run=counter_run(f"n{number}")).state == SUCCEEDED
        wait_counting(session, f"w{number}")
    return session


def holders(session: Session, *workload_ids: str) -> None:
    """Waits for a load that shows these holders, and no GPU under a hold."""
    session.wait(
        lambda f: (
            [gpu.workload_id for gpu in f.worker_load.gpu_leases] == list(workload_ids)
            and not any(gpu.HasField("hold") for gpu in f.worker_load.gpu_leases)
        )
    )


@pytest.mark.long
def test_a_run_preempts_and_says_whom(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost
) -> None:
    start_worker(host)
    session = start_two(coordinator)
    outcome = session.run("big", "w3", run=counter_run("n3", 2, preempt=["w2", "w1"]))
    assert outcome.state == SUCCEEDED, outcome.error
    assert list(outcome.result.preempted_workload_ids) == ["w2", "w1"]
    wait_counting(session, "w3")
    holders(session, "w3", "w3")
    back = session.run("back", "w1", restore=RestoreOperation(preempt=["w3"]))
    assert back.state == SUCCEEDED, back.error
    wait_counting(session, "w1")
    holders(session, "w1", "")
    assert list(back.result.preempted_workload_ids) == ["w3"]


@pytest.mark.long
def test_a_run_that_fails_restores_whom_it_preempted_on_their_gpus(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost
) -> None:
    start_worker(host)
    session = start_two(coordinator)
    spec = workload_pb2.WorkloadSpec(
        arguments=["/no/such/program"], resources=workload_pb2.Resources(gpu_count=2)
    )
    wrong = RunOperation(name="n3", spec=spec, preempt=["w1", "w2"])
    outcome = session.run("wrong", "w3", run=wrong)
    assert outcome.state == FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_SPAWN_FAILED
    assert not outcome.result.preempted_workload_ids
    assert [text for text in outcome.result.warnings if "restored after the failure" in text]
    for number in (1, 2):
        wait_counting(session, f"w{number}", host.gpus[number - 1].uuid)
    holders(session, "w1", "w2")


@pytest.mark.long
def test_a_suspend_that_fails_restores_those_before(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost
) -> None:
    start_worker(host)
    session = start_two(coordinator)
    outcome = session.run("big", "w3", run=counter_run("n3", 2, preempt=["w1", "w9"]))
    assert outcome.state == FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD
    assert "w9 can't be suspended" in outcome.error.message
    wait_counting(session, "w1", host.gpus[0].uuid)
    holders(session, "w1", "w2")


@pytest.mark.long
def test_whoever_was_suspended_before_stays_so(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost
) -> None:
    start_worker(host)
    session = start_two(coordinator)
    session.run("park", "w1", suspend=SuspendOperation())
    outcome = session.run("big", "w3", run=counter_run("n3", 3, preempt=["w1", "w2"]))
    assert outcome.error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    wait_counting(session, "w2", host.gpus[1].uuid)
    holders(session, "", "w2")


@pytest.mark.long
def test_a_workload_without_a_gpu_is_not_preempted(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost
) -> None:
    """No hold would name it, so nothing would restore it after a failure, and no result would name it."""
    start_worker(host)
    session = start_two(coordinator)
    policy = EvictionPolicy(process_strategy=CUDA_SUSPEND, escalate_to=STOP)
    spec = workload_pb2.WorkloadSpec(arguments=["sleep", "100"], eviction=policy)
    assert session.run("cpu", "w3", run=RunOperation(name="cpu", spec=spec)).state == SUCCEEDED
    for command_id, operation in (
        ("run", {"run": counter_run("n4", preempt=["w1", "w3"])}),
        ("restore", {"restore": RestoreOperation(preempt=["w1", "w3"])}),
    ):
        outcome = session.run(command_id, "w4" if command_id == "run" else "w2", **operation)
        assert outcome.error.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
        assert outcome.error.message.startswith("workload cpu holds no GPU")
    wait_counting(session, "w1", host.gpus[0].uuid)
    holders(session, "w1", "w2")


@pytest.mark.long
@pytest.mark.parametrize(
    "crash_point",
    grid(
        (
            "intent-preempt",
            "command-journaled:4",
            "intent-checkpoint",
            "phase-verify",
            "outcome-journaled:3",
            "intent-checkpoint:2",
            "outcome-journaled:4",
            "intent-run:3",
            "program-started:3",
            "operation-ended:5",
            "outcome-journaled:5",
        ),
        "intent-checkpoint:2",
    ),
)
def test_all_or_nothing_wherever_the_worker_is_killed(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, crash_point: str
) -> None:
    doomed = start_worker(host, crash_point=crash_point)
    session = start_two(coordinator)
    command = make_command("big", "w3", run=counter_run("n3", 2, preempt=["w1", "w2"]))
    session.send(command)
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    again.send(command)
    outcome = again.outcome("big")
    if outcome.state == SUCCEEDED:
        assert list(outcome.result.preempted_workload_ids) == ["w1", "w2"]
        wait_counting(again, "w3")
        for workload_id in ("w1", "w2"):
            until(again, workload_id, SUSPENDED)
        holders(again, "w3", "w3")
    else:
        assert outcome.error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
        assert not outcome.result.preempted_workload_ids
        for number in (1, 2):
            until(again, f"w{number}", RUNNING)
            wait_counting(again, f"w{number}", host.gpus[number - 1].uuid)
        holders(again, "w1", "w2")
        assert len(counters(host)) == 2


@pytest.mark.long
@pytest.mark.parametrize("crash_point", ["intent-restore", "outcome-journaled:6"])
def test_a_way_back_that_was_interrupted_is_finished(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, crash_point: str
) -> None:
    doomed = start_worker(host, crash_point=crash_point)
    session = start_two(coordinator)
    command = make_command("big", "w3", run=counter_run("n3", 3, preempt=["w1", "w2"]))
    session.send(command)
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    again.send(command)
    outcome = again.outcome("big")
    assert outcome.error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    for number in (1, 2):
        wait_counting(again, f"w{number}", host.gpus[number - 1].uuid)
    holders(again, "w1", "w2")
