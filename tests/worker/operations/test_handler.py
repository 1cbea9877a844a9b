"""Operations of a worker process that are planned, cancelled, undone, or concern several workloads."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, gpu_pb2, lease_pb2, plan_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import WEIGHT_STRATEGY_OFFLOAD, WEIGHT_STRATEGY_RETAIN, EvictionPolicy
from leasehold.v1.hook_pb2 import HOOK_PHASE_BEFORE_SUSPEND, CommandHook, Hook
from leasehold.v1.operation_pb2 import (
    Move,
    Operation,
    RemapOperation,
    RestoreOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.worker.v1.session_pb2 import CommandSpec, ConnectResponse, PlanQuery, WorkerLoad
from leasehold_simgpu import Fault, ProcessState, SimulatedHost, Timing
from leasehold_worker.host.processes import identify
from leasehold_worker.host.shared_libraries import loaded_library

from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, unhandled_run, wait_counting
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command

SUCCEEDED, FAILED, CANCELLED = (
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_CANCELLED,
)
RUNNING = workload_pb2.WORKLOAD_STATE_RUNNING
SUSPENDED = workload_pb2.WORKLOAD_STATE_SUSPENDED


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


def plan_of(session: Session, workload_id: str, **operation: object) -> plan_pb2.Plan:
    plan_id = f"plan-{time.monotonic_ns()}"
    query = PlanQuery(plan_id=plan_id, workload_id=workload_id, operation=Operation(**operation))  # type: ignore[arg-type]
    session.down.put(ConnectResponse(plan_query=query))
    frame = session.wait(lambda f: f.HasField("plan_answer") and f.plan_answer.plan_id == plan_id)
    assert not frame.plan_answer.HasField("error"), frame.plan_answer.error
    return frame.plan_answer.plan


def start(session: Session, workload_id: str, gpu_count: int = 1) -> int:
    """Starts a counter, and returns its process id."""
    started = session.run(f"run-{workload_id}", workload_id, run=counter_run(workload_id, gpu_count))
    assert started.state == SUCCEEDED
    wait_counting(session, workload_id)
    return started.workloads[0].status.root_pid


def cancel(session: Session, command: CommandSpec) -> None:
    """Cancels a command, and returns when the worker, which reads frames in order, knows it."""
    session.send(command, cancel=True)
    plan_id = f"after-{command.command_id}"
    session.down.put(ConnectResponse(plan_query=PlanQuery(plan_id=plan_id)))
    session.wait(lambda f: f.plan_answer.plan_id == plan_id)


def move(workload_id: str, old: str, new: str) -> Move:
    return Move(workload_id=workload_id, pairs=[gpu_pb2.GpuPair(old_uuid=old, new_uuid=new)])


def uuids(host: SimulatedHost) -> list[str]:
    return [gpu.uuid for gpu in host.gpus]


def leases(session: Session, holders: list[str]) -> None:
    """Waits until the newest load says so."""
    deadline = time.monotonic() + 10
    while [lease.workload_id for lease in newest_load(session).gpu_leases] != holders:
        assert time.monotonic() < deadline, newest_load(session)
        time.sleep(0.02)


def newest_load(session: Session) -> WorkerLoad:
    loads = [frame.worker_load for frame in session.frames if frame.HasField("worker_load")]
    return loads[-1] if loads else WorkerLoad()


@pytest.mark.long
def test_a_plan_has_a_step_of_hooks_only_if_any_is_called(session: Session) -> None:
    asked = SuspendOperation(policy=EvictionPolicy(weight_strategy=WEIGHT_STRATEGY_RETAIN))
    hook = Hook(name="down", phase=HOOK_PHASE_BEFORE_SUSPEND, command=CommandHook(arguments=["true"]))
    unconcerned = Hook(name="other", weight_strategies=[WEIGHT_STRATEGY_OFFLOAD])
    unconcerned.MergeFrom(Hook(phase=hook.phase, command=hook.command))
    moved = "the driver moves device memory to host memory"
    for name, hooks, steps in (
        ("bare", [], [moved]),
        ("hooked", [hook], ["the workload's hooks are called", moved]),
        ("unconcerned", [unconcerned], [moved]),
    ):
        operation = counter_run(name)
        operation.spec.hooks.extend(hooks)
        assert session.run(f"run-{name}", name, run=operation).state == SUCCEEDED
        wait_counting(session, name)
        assert plan_of(session, name, suspend=asked).steps == steps
        assert session.run(f"suspend-{name}", name, suspend=asked).state == SUCCEEDED
        assert len(plan_of(session, name, restore=RestoreOperation()).steps) == len(steps)


def test_the_driver_is_asked_nothing_twice(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")

    def calls_during(command_id: str, **operation: object) -> dict[str, int]:
        before = Counter(calls_of(host, pid))
        assert session.run(command_id, "w1", **operation).state == SUCCEEDED
        return dict(Counter(calls_of(host, pid)) - before)

    # Each state once where a plan needs it, and once after each call that changes it.
    suspended = calls_during("c2", suspend=SuspendOperation())
    assert suspended == {"get_restore_thread_id": 1, "get_state": 3, "lock": 1, "checkpoint": 1}
    assert calls_during("c3", restore=RestoreOperation()) == {"get_state": 2, "restore": 1, "unlock": 1}


def calls_of(host: SimulatedHost, pid: int) -> Mapping[str, int]:
    """How often each driver call came for a process."""
    process = host.process(pid)
    assert process is not None
    return process.calls


def wait_until_met(host: SimulatedHost, fault: Fault) -> None:
    """Waits until a call has come that a fault of one call holds."""
    deadline = time.monotonic() + 30
    while fault.id in {active.id for active in host.faults()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
def test_a_suspend_that_is_cancelled_during_the_lock_is_undone(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    fault = host.set_fault("lock", pid, hang=True, times=1)
    command = make_command("c2", "w1", suspend=SuspendOperation())
    session.send(command)
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "lock")
    cancel(session, command)
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c2")
    assert outcome.state == CANCELLED
    assert "rolled back" in outcome.error.message
    assert [member.rolled_back for member in outcome.result.members] == [True]
    assert outcome.workloads[0].status.state == RUNNING
    wait_counting(session, "w1")


@pytest.mark.long
def test_a_suspend_that_is_cancelled_before_its_lock_times_out_is_cancelled(
    session: Session, host: SimulatedHost
) -> None:
    """The lock is one call of the driver, so the cancellation waits for its end."""
    host.set_busy(start(session, "w1"))
    operation = SuspendOperation(lock_timeout=duration_pb2.Duration(seconds=2))
    command = make_command("c2", "w1", suspend=operation)
    session.send(command)
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "lock")
    cancel(session, command)
    outcome = session.outcome("c2")
    assert outcome.state == CANCELLED
    assert "rolled back" in outcome.error.message
    assert outcome.workloads[0].status.state == RUNNING


@pytest.mark.long
def test_a_suspend_that_is_cancelled_later_is_finished_and_says_so(
    session: Session, host: SimulatedHost
) -> None:
    pid = start(session, "w1")
    fault = host.set_fault("checkpoint", pid, hang=True, times=1)
    command = make_command("c2", "w1", suspend=SuspendOperation())
    session.send(command)
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "checkpoint")
    cancel(session, command)
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c2")
    assert outcome.state == SUCCEEDED
    assert any("after the point of no return" in warning for warning in outcome.result.warnings)
    assert outcome.workloads[0].status.state == SUSPENDED


@pytest.mark.long
def test_a_timeout_during_the_lock_undoes_it(session: Session, host: SimulatedHost) -> None:
    host.set_busy(start(session, "w1"))
    command = make_command(
        "c2", "w1", suspend=SuspendOperation(lock_timeout=duration_pb2.Duration(seconds=3))
    )
    command.timeout.FromMilliseconds(2000)  # time enough to come to the lock on a busy machine
    session.send(command)
    outcome = session.outcome("c2")
    assert outcome.state == FAILED
    assert outcome.workloads[0].status.state == RUNNING


@pytest.mark.long
def test_a_command_that_waited_for_a_frozen_worker_is_not_carried_out_late(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    pid = start(session, "w1")
    command = make_command("c2", "w1", suspend=SuspendOperation())
    command.timeout.FromMilliseconds(1500)
    worker.process.send_signal(signal.SIGSTOP)
    session.send(command)
    while not session.down.empty():
        time.sleep(0.01)
    time.sleep(2)  # the timeout passes
    worker.process.send_signal(signal.SIGCONT)
    outcome = session.outcome("c2")
    assert outcome.state == command_pb2.COMMAND_STATE_EXPIRED, outcome
    assert outcome.error.reason == errors_pb2.ERROR_REASON_EXPIRED
    assert calls_of(host, pid)["lock"] == 0
    assert session.run("c3", "w1", suspend=SuspendOperation()).state == SUCCEEDED


def test_two_workloads_swap_their_gpus_by_one_command(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    start(session, "w2")
    first, second = uuids(host)[:2]
    swap = RemapOperation(moves=[move("w1", first, second), move("w2", second, first)])
    plan = plan_of(session, "", remap=swap)
    assert not plan.refusals
    assert [destination.gpu_uuid for destination in plan.destinations] == [second, first]
    assert {member.workload_id for member in plan.members} == {"w1", "w2"}
    outcome = session.run("c3", "w1", remap=swap)
    assert outcome.state == SUCCEEDED, outcome
    assert {workload.workload_id for workload in outcome.workloads} == {"w1", "w2"}
    assert not any("NCCL" in warning for warning in outcome.result.warnings), "neither has loaded it"
    leases(session, ["w2", "w1", "", ""])
    wait_counting(session, "w1", second)
    wait_counting(session, "w2", first)


WITH_NCCL = """
import ctypes, runpy, sys
ctypes.CDLL(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_a_move_of_a_workload_that_has_loaded_nccl_warns(
    session: Session, host: SimulatedHost, tmp_path: Path
) -> None:
    library = loaded_library(os.getpid(), "libm.so")
    assert library is not None
    nccl = shutil.copyfile(library.path, tmp_path / "libnccl.so.2")
    run = counter_run("one")
    run.spec.arguments[1:2] = ["-c", WITH_NCCL, str(nccl), run.spec.arguments[1]]
    session.run("c1", "w1", run=run)
    wait_counting(session, "w1")
    first, second = uuids(host)[:2]
    outcome = session.run("c2", "w1", remap=RemapOperation(moves=[move("w1", first, second)]))
    assert outcome.state == SUCCEEDED, outcome
    assert any("has loaded NCCL" in warning for warning in outcome.result.warnings)


def test_a_swap_that_fails_for_one_is_undone_for_both(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    pid = start(session, "w2")
    first, second = uuids(host)[:2]
    host.set_fault("restore", pid, error=801, times=1)
    swap = RemapOperation(moves=[move("w1", first, second), move("w2", second, first)])
    outcome = session.run("c3", "w1", remap=swap)
    assert outcome.state == FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_STATE
    assert [workload.status.state for workload in outcome.workloads] == [RUNNING, RUNNING]
    leases(session, ["w1", "w2", "", ""])
    wait_counting(session, "w1", first)
    wait_counting(session, "w2", second)


@pytest.mark.long
def test_a_workload_of_a_swap_takes_no_other_command(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    start(session, "w2")
    first, second = uuids(host)[:2]
    fault = host.set_fault("lock", pid, hang=True, times=1)
    swap = RemapOperation(moves=[move("w1", first, second), move("w2", second, first)])
    session.send(make_command("c3", "w1", remap=swap))
    session.wait(lambda f: f.command_update.command_id == "c3" and f.command_update.phase == "lock")
    busy = session.run("c4", "w2", suspend=SuspendOperation())
    assert busy.error.reason == errors_pb2.ERROR_REASON_WORKLOAD_BUSY
    host.clear_faults(fault_id=fault.id)
    assert session.outcome("c3").state == SUCCEEDED


@pytest.mark.long
def test_a_remap_that_can_go_nowhere_leaves_the_workload_parked(
    session: Session, host: SimulatedHost
) -> None:
    pid = start(session, "w1")
    first, second = uuids(host)[:2]
    fault = host.set_fault("unlock", pid, error=999)
    outcome = session.run("c2", "w1", remap=RemapOperation(moves=[move("w1", first, second)]))
    assert outcome.state == FAILED
    assert outcome.workloads[0].status.state == SUSPENDED
    assert any("old GPUs failed too" in warning for warning in outcome.result.warnings)
    leases(session, ["", "", "", ""])
    host.clear_faults(fault_id=fault.id)
    assert session.run("c3", "w1", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "w1", first)


@pytest.mark.long
def test_a_member_that_can_not_be_asked_is_unknown_and_a_restore_finds_it_again(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
) -> None:
    config = tmp_path / "worker.toml"
    config.write_text("driver_call_floor_s = 3\n")
    start_worker(host, config=str(config))
    session = coordinator.next_session()
    pid = start(session, "w1")
    host.set_fault("checkpoint", pid, hang=True)
    host.set_fault("get_state", pid, hang=True, after=2)
    outcome = session.run("c2", "w1", suspend=SuspendOperation())
    assert outcome.error.reason == errors_pb2.ERROR_REASON_DRIVER_TIMEOUT
    assert outcome.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_UNKNOWN
    leases(session, ["w1", "", "", ""])
    host.clear_faults()
    restored = session.run("c3", "w1", restore=RestoreOperation())
    assert restored.state == SUCCEEDED, restored
    assert restored.workloads[0].status.state == RUNNING
    wait_counting(session, "w1")


@pytest.mark.long
def test_a_member_that_failed_on_a_lost_gpu_keeps_that_gpu(session: Session, host: SimulatedHost) -> None:
    """NVML says nothing of a lost GPU, which may have the memory of the member."""
    pid = start(session, "w1")
    fault = host.set_fault("checkpoint", pid, state=ProcessState.FAILED, hang=True, times=1)
    session.send(make_command("c2", "w1", suspend=SuspendOperation()))
    wait_until_met(host, fault)
    host.lose_gpu(0)
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c2")
    assert outcome.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_WEDGED
    assert not outcome.result.released_gpu_uuids


@pytest.mark.long
def test_a_workload_that_was_restored_is_suspended_before_it_is_killed(
    session: Session, host: SimulatedHost
) -> None:
    session.run("c1", "w1", run=unhandled_run("w1"))
    wait_counting(session, "w1")
    session.run("c2", "w1", suspend=SuspendOperation())
    assert session.run("c3", "w1", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "w1")
    stopped = session.run("c4", "w1", stop=StopOperation())
    assert stopped.state == SUCCEEDED
    (member,) = stopped.result.members
    assert [phase.phase for phase in member.phases] == ["lock", "checkpoint"]
    assert stopped.workloads[0].status.exit.signal_number == 9


@pytest.mark.long
def test_what_can_not_be_suspended_is_killed_by_force_only(session: Session, host: SimulatedHost) -> None:
    pid = session.run("c1", "w1", run=unhandled_run("w1")).workloads[0].status.root_pid
    wait_counting(session, "w1")
    session.run("c2", "w1", suspend=SuspendOperation())
    session.run("c3", "w1", restore=RestoreOperation())
    wait_counting(session, "w1")
    grace = duration_pb2.Duration()
    os.kill(pid, signal.SIGSTOP)
    stopped = session.run("c3b", "w1", stop=StopOperation(grace=grace))
    assert "is stopped by a signal" in stopped.error.message
    assert stopped.error.message.endswith("resume the process first, or use `--force`")
    os.kill(pid, signal.SIGCONT)
    host.set_fault("checkpoint", pid, error=801)
    refused = session.run("c4", "w1", stop=StopOperation(grace=grace))
    assert refused.state == FAILED
    assert refused.error.reason == errors_pb2.ERROR_REASON_UNSAFE_KILL
    assert refused.workloads[0].status.state == RUNNING
    wait_counting(session, "w1")
    assert session.run("c5", "w1", stop=StopOperation(grace=grace, force=True)).state == SUCCEEDED
    leases(session, ["", "", "", ""])


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        pytest.param("get_restore_thread_id", marks=pytest.mark.long),
        pytest.param("get_state", marks=pytest.mark.long),
        "lock",
        pytest.param("checkpoint", marks=pytest.mark.long),
    ],
)
def test_a_member_that_is_killed_by_a_call_is_told_as_crashed(
    session: Session, host: SimulatedHost, call: str
) -> None:
    pid = start(session, "w1")
    host.set_fault(call, pid, signal=signal.SIGKILL, times=1)
    outcome = session.run("c2", "w1", suspend=SuspendOperation())
    assert outcome.state == FAILED, outcome.error
    assert outcome.error.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED, outcome.error


LEAVES_CUDA = """
import os, runpy, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: os.execvp("sleep", ["sleep", "300"]))
signal.signal = lambda *_: None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_a_member_that_dies_during_the_proof_is_told_as_crashed(
    session: Session, host: SimulatedHost
) -> None:
    """NVML then lists it on no GPU, as if a restore had done nothing."""
    pid = start(session, "w1")
    assert session.run("c2", "w1", suspend=SuspendOperation()).state == SUCCEEDED
    host.set_fault("restore", pid, ignore_gpu_pairs=True)
    session.send(make_command("c3", "w1", restore=RestoreOperation(gpu_uuids=[uuids(host)[1]])))
    session.wait(lambda f: f.command_update.command_id == "c3" and f.command_update.phase == "verify")
    os.kill(pid, signal.SIGKILL)
    outcome = session.outcome("c3")
    assert outcome.error.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED, outcome.error
    leases(session, ["", "", "", ""])


@pytest.mark.long
def test_a_member_that_leaves_cuda_while_it_is_suspended_for_a_kill_is_killed(
    session: Session, host: SimulatedHost
) -> None:
    run = counter_run("w1")
    run.spec.arguments[1:2] = ["-c", LEAVES_CUDA, run.spec.arguments[1]]
    pid = session.run("c1", "w1", run=run).workloads[0].status.root_pid
    wait_counting(session, "w1")
    session.run("c2", "w1", suspend=SuspendOperation())
    session.run("c3", "w1", restore=RestoreOperation())
    wait_counting(session, "w1")
    fault = host.set_fault("lock", pid, error=1, hang=True, times=1)
    session.send(make_command("c4", "w1", stop=StopOperation(grace=duration_pb2.Duration())))
    wait_until_met(host, fault)
    os.kill(pid, signal.SIGUSR1)
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c4")
    assert outcome.state == SUCCEEDED, outcome
    assert outcome.workloads[0].status.exit.signal_number == signal.SIGKILL


def test_a_result_has_the_timings_of_every_phase(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    outcome = session.run("c2", "w1", suspend=SuspendOperation())
    assert [phase.phase for phase in outcome.result.phases] == ["preflight", "lock", "checkpoint", "verify"]
    assert not any(phase.failed or phase.rollback for phase in outcome.result.phases)
    (member,) = outcome.result.members
    assert [(phase.phase, phase.HasField("moved_bytes")) for phase in member.phases] == [
        ("lock", False),
        ("checkpoint", True),
    ]
    assert all(phase.duration.ToNanoseconds() > 0 for phase in member.phases)
    assert member.phases[1].moved_bytes > 2**20


@pytest.mark.long
def test_a_rollback_is_among_the_phases(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    host.set_fault("checkpoint", pid, error=801, times=1)
    result = session.run("c2", "w1", suspend=SuspendOperation()).result
    assert [(p.phase, p.failed, p.rollback) for p in result.phases] == [
        ("preflight", False, False),
        ("lock", False, False),
        ("checkpoint", True, False),
        ("rollback", False, True),
    ]
    assert [(p.phase, p.failed, p.rollback) for p in result.members[0].phases] == [
        ("lock", False, False),
        ("checkpoint", True, False),
        ("unlock", False, True),
    ]


@pytest.mark.long
def test_a_foreign_process_on_the_destination_stops_a_move_in_the_middle(
    session: Session, host: SimulatedHost
) -> None:
    """Memory that is taken between the check and the restore: the workload goes back, and nothing wedges."""
    pid = start(session, "w1")
    first, second = uuids(host)[:2]
    fault = host.set_fault("checkpoint", pid, hang=True, times=1)
    command = make_command("c2", "w1", remap=RemapOperation(moves=[move("w1", first, second)]))
    session.send(command)
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "checkpoint")
    host.hog(second, host.gpus[1].memory_bytes)
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c2")
    assert outcome.state == FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY
    assert outcome.workloads[0].status.state == RUNNING
    wait_counting(session, "w1", first)


@pytest.mark.long
def test_no_lease_is_left_reserved(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    first, second = uuids(host)[:2]
    host.set_fault("lock", error=304, times=1)
    session.run("c2", "w1", remap=RemapOperation(moves=[move("w1", first, second)]))
    leases(session, ["w1", "", "", ""])
    assert {lease.state for lease in newest_load(session).gpu_leases} == {
        lease_pb2.SLOT_STATE_LEASED,
        lease_pb2.SLOT_STATE_FREE,
    }


def test_the_agent_itself_never_loads_the_driver(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    start(session, "w1")
    session.run("c2", "w1", suspend=SuspendOperation())
    assert loaded_library(worker.process.pid, "libcuda.so") is None
    assert loaded_library(worker.process.pid, "libnvidia-ml.so") is not None


@pytest.mark.long
def test_jobs_that_share_memory_are_called_one_after_the_other(session: Session, host: SimulatedHost) -> None:
    """A lock of the second member begins only when that of the first has ended."""
    run = counter_run("w1")
    run.spec.arguments[:] = [
        *("/bin/sh", "-c", 'for n in 1 2; do "$@" & done; wait', "sh"),
        *run.spec.arguments,
    ]
    run.spec.environment["CUDA_CHECKPOINT_JOB_FILE"] = "/proc/self/fd/3"
    session.run("c1", "w1", run=run)
    deadline = time.monotonic() + 20
    while len(plan_of(session, "w1", suspend=SuspendOperation()).members) < 2:
        assert time.monotonic() < deadline
    host.set_fault("lock", delay_s=0.2, times=2)
    result = session.run("c2", "w1", suspend=SuspendOperation()).result
    (lock,) = [phase for phase in result.phases if phase.phase == "lock"]
    assert lock.duration.ToNanoseconds() >= 0.4e9


@pytest.mark.long
def test_a_workload_whose_members_ended_while_it_was_parked_runs_on_without_them(
    session: Session, host: SimulatedHost
) -> None:
    run = counter_run("w1")
    run.spec.arguments[:] = ["/bin/sh", "-c", '"$@" & sleep 60', "sh", *run.spec.arguments]
    session.run("c1", "w1", run=run)
    wait_counting(session, "w1")
    parked = session.run("c2", "w1", suspend=SuspendOperation())
    (member,) = parked.workloads[0].status.members
    os.kill(member.pid, signal.SIGKILL)
    while identify(member.pid) is not None:
        time.sleep(0.01)
    restored = session.run("c3", "w1", restore=RestoreOperation())
    assert restored.state == SUCCEEDED, restored
    assert any("ended while suspended" in warning for warning in restored.result.warnings)
    assert restored.workloads[0].status.state == RUNNING
    leases(session, ["w1", "", "", ""])
