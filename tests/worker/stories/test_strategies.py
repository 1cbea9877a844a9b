"""What goes wrong while a workload is parked or woken: crashes, deaths, hooks; on a real worker."""

from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RestoreOperation, SuspendOperation
from leasehold_simgpu import SimulatedHost, Timing

from tests.worker.counters import counts, read_output, wait_counting
from tests.worker.criu_cases import real_criu
from tests.worker.parking_cases import (
    AFTER,
    BEFORE,
    CHECKPOINT,
    CUDA_SUSPEND,
    FAILED,
    FREE,
    KEEP_RUNNING,
    STOP,
    SUCCEEDED,
    Start,
    found,
    hook,
    is_well,
    slots,
    start,
    suspend,
)
from tests.worker.scripted_coordinator import ScriptedCoordinator, make_command

pytestmark = pytest.mark.usefixtures("with_criu")


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())


@pytest.mark.long
def test_a_stronger_suspend_that_is_refused_says_why_and_leaves_all_as_it_was(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    settings = tmp_path / "worker.toml"
    settings.write_text('criu = "/nonexistent/criu"\n')
    start_worker(host, config=str(settings))
    session = coordinator.next_session()
    start(session)
    assert suspend(session, "s", CUDA_SUSPEND, STOP) == SUCCEEDED
    policy = EvictionPolicy(process_strategy=CHECKPOINT)
    refused = session.run("c", "w", suspend=SuspendOperation(policy=policy))
    assert refused.error.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY
    assert "/nonexistent/criu" in refused.error.message
    assert session.run("r", "w", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "w")


@pytest.mark.parametrize("point", ["phase-verify", "intent-resume", "phase-resume"])
@pytest.mark.long
def test_a_worker_that_dies_while_it_wakes_an_image_still_has_it(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, point: str
) -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    # The first "verify" is that of the suspend.
    worker = start_worker(host, crash_point="phase-verify:2" if point == "phase-verify" else point)
    session = coordinator.next_session()
    start(session)
    assert suspend(session, "s", CHECKPOINT) == SUCCEEDED
    before = counts(read_output(session, "w"))
    session.send(make_command("r", "w", restore=RestoreOperation()))
    worker.process.wait(30)
    start_worker(host)
    again = coordinator.next_session()
    if point != "phase-verify":  # else it was not begun, and is begun again
        assert again.outcome("r").error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
        assert again.run("r2", "w", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(again, "w")
    after = counts(read_output(again, "w"))
    assert after[: len(before)] == before
    assert after == list(range(after[0], after[0] + len(after)))


@pytest.mark.long
def test_a_sleeper_that_dies_while_it_is_woken_keeps_no_gpu(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    start_worker(host)
    session = coordinator.next_session()
    start(session, [hook("fatal", AFTER, "kill -9 {members}; sleep 0.5")])
    assert suspend(session, "s", KEEP_RUNNING) == SUCCEEDED
    woken = session.run("r", "w", restore=RestoreOperation())
    assert woken.error.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED
    session.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(session) == [FREE, FREE])


@pytest.mark.parametrize("by_itself", [False, True], ids=["by wake", "by itself"])
@pytest.mark.long
def test_a_way_up_that_fails_after_a_crash_is_told_and_gone_again_later(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
    by_itself: bool,
) -> None:
    ready, awake = tmp_path / "ready", tmp_path / "awake"
    worker = start_worker(host, crash_point="phase-hooks:2")
    session = coordinator.next_session()
    hooks = [hook("down", BEFORE, "true"), hook("up", AFTER, f"test -e {ready} && touch {awake}")]
    start(session, hooks)
    assert suspend(session, "s", CUDA_SUSPEND) == SUCCEEDED
    session.send(make_command("r", "w", restore=RestoreOperation()))
    worker.process.wait(30)
    start_worker(host)
    again = coordinator.next_session()
    outcome = again.outcome("r")
    assert (outcome.state, outcome.error.reason) == (FAILED, errors_pb2.ERROR_REASON_HOOK_FAILED)
    (half_awake,) = outcome.workloads
    assert (half_awake.status.state, half_awake.status.error.reason) == (
        workload_pb2.WORKLOAD_STATE_RUNNING,
        errors_pb2.ERROR_REASON_HOOK_FAILED,
    )
    assert not awake.exists()
    ready.touch()
    if by_itself:
        again.wait(lambda f: f.HasField("workload_event") and is_well(f.workload_event.workload))
        assert awake.exists()
        return
    woken = again.run("r2", "w", restore=RestoreOperation())
    assert woken.state == SUCCEEDED
    assert is_well(woken.workloads[0])
    assert awake.exists()
    nothing = again.run("r3", "w", restore=RestoreOperation())
    assert nothing.result.already_there


@pytest.mark.parametrize("point", ["phase-lock", "intent-image", "image-final"])
@pytest.mark.long
def test_a_sleeper_that_was_to_become_an_image_when_the_worker_died_sleeps(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, point: str
) -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    worker = start_worker(host, crash_point=point)
    session = coordinator.next_session()
    start(session)
    assert suspend(session, "s", KEEP_RUNNING) == SUCCEEDED
    policy = EvictionPolicy(process_strategy=CHECKPOINT)
    session.send(make_command("c", "w", suspend=SuspendOperation(policy=policy, force=True)))
    worker.process.wait(30)
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("c").error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    (sleeper,) = again.outcome("c").workloads
    assert sleeper.status.state == workload_pb2.WORKLOAD_STATE_SLEEPING
    again.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(again) == [FREE, FREE])
    assert again.run("r", "w", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(again, "w")


@pytest.mark.long
def test_hooks_that_an_earlier_suspend_has_undone_are_forgotten(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """Else a later start would undo the policy of that one, in place of the one that it finds begun."""
    trace = tmp_path / "trace"
    worker = start_worker(host)
    session = coordinator.next_session()
    note = f"echo {{phase}} {{policy}} >> {trace}"
    (member,) = start(session, [hook("down", BEFORE, note), hook("up", AFTER, note)])
    host.set_fault("checkpoint", member, error=999)
    assert suspend(session, "s", CUDA_SUSPEND) == FAILED
    worker.kill()
    worker = start_worker(host, crash_point="hook-noted")
    session = coordinator.next_session()
    policy = EvictionPolicy(process_strategy=KEEP_RUNNING)
    session.send(make_command("k", "w", suspend=SuspendOperation(policy=policy, force=True)))
    worker.process.wait(30)
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("k").error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    assert trace.read_text().splitlines() == [
        "before_suspend retain+cuda_suspend",
        "rollback retain+cuda_suspend",
        "rollback retain+keep_running",
    ]


@pytest.mark.long
def test_hooks_of_a_suspend_that_died_are_undone_at_the_next_start(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    worker = start_worker(host, crash_point="phase-lock")
    session = coordinator.next_session()
    hooks = [
        hook("down", BEFORE, f"echo {{phase}} {{policy}} >> {trace}"),
        hook("up", AFTER, f"echo {{phase}} >> {trace}"),
    ]
    start(session, hooks)
    session.send(make_command("s", "w", suspend=SuspendOperation()))
    worker.process.wait(30)
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("s").error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    assert trace.read_text().splitlines() == ["before_suspend retain+cuda_suspend", "rollback"]
    wait_counting(again, "w")


@pytest.mark.long
def test_who_is_parked_without_processes_and_told_to_end_for_good_is_stopped_not_half_woken(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host, crash_point="intent-end")
    session = coordinator.next_session()
    start(session)
    assert suspend(session, "s", CUDA_SUSPEND) == SUCCEEDED
    policy = EvictionPolicy(process_strategy=STOP)
    session.send(make_command("e", "w", suspend=SuspendOperation(policy=policy, force=True)))
    worker.process.wait(30)
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("e").state == SUCCEEDED
    assert again.run("r", "w", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(again, "w")
    assert found(again).workload_id == "w"
