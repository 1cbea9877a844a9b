"""Plans on hosts with one thing wrong each: all that is in the way is named, and nothing is changed."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, gpu_pb2, plan_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.operation_pb2 import Move, RemapOperation, RestoreOperation, SuspendOperation
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.driver.errors import DriverError
from leasehold_worker.driver.helper_pool import Driver, DriverCallUnansweredError, DriverUnavailableError
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import RUNNING, Member
from leasehold_worker.driver.process import CheckpointProcess
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import identify
from leasehold_worker.planning.driver_checks import DriverChecks
from leasehold_worker.planning.findings import Findings

from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, wait_counting
from tests.worker.operations.test_handler import leases, move, plan_of, start, uuids
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session

PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
Connect = Callable[..., Session]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


@pytest.fixture
def connect(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, tmp_path: Path
) -> Connect:
    """Starts a worker with lines of configuration, and gives its session."""

    def connect_worker(host: SimulatedHost, *lines: str) -> Session:
        config = tmp_path / "worker.toml"
        config.write_text("\n".join(lines))
        start_worker(host, config=str(config))
        return coordinator.next_session()

    return connect_worker


def reasons(plan: plan_pb2.Plan) -> list[str]:
    """The refusals of a plan, each of which says what to do."""
    assert all(refusal.message for refusal in plan.refusals)
    refused = [check for check in plan.checks if check.result == plan_pb2.CHECK_RESULT_REFUSED]
    assert len(refused) == len(plan.refusals)
    return [ErrorReason.Name(refusal.reason).removeprefix("ERROR_REASON_") for refusal in plan.refusals]


def remap_to(host: SimulatedHost, index: int) -> RemapOperation:
    return RemapOperation(moves=[move("w1", host.gpus[0].uuid, host.gpus[index].uuid)])


def test_a_host_with_nothing_wrong(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    plan = plan_of(session, "w1", suspend=SuspendOperation())
    assert reasons(plan) == []
    assert [check.result for check in plan.checks] == [plan_pb2.CHECK_RESULT_PASSED] * len(plan.checks)
    assert {check.name for check in plan.checks} == {
        *("policy", "state", "driver", "mig", "present", "runnable", "members"),
        *("mps", "libcuda", "trace_permission", "host_memory"),
    }
    (member,) = plan.members
    assert member.workload_id == "w1"
    assert member.member.pid == pid
    assert list(member.member.device_memory_bytes) == [host.gpus[0].uuid]
    assert plan.host_memory.needed_bytes == sum(member.member.device_memory_bytes.values())
    assert plan.host_memory.available_bytes > plan.host_memory.needed_bytes
    assert list(plan.released_gpu_uuids) == [host.gpus[0].uuid]
    assert plan.estimate.duration.ToNanoseconds() > 0
    assert "assumed" in plan.estimate.basis


@pytest.mark.long
def test_a_plan_of_a_move_has_the_completed_pairs(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    plan = plan_of(session, "", remap=remap_to(host, 1))
    assert reasons(plan) == []
    first, second, third, fourth = uuids(host)
    assert {(pair.old_uuid, pair.new_uuid) for pair in plan.pairs} == {
        *((first, second), (second, first), (third, third), (fourth, fourth))
    }
    (destination,) = plan.destinations
    assert destination.gpu_uuid == second
    assert destination.free_bytes > destination.needed_bytes > 2**20
    assert list(plan.released_gpu_uuids) == [first]


@pytest.mark.long
def test_a_plan_of_several_workloads_says_whose_each_check_is(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    start(session, "w2")
    first, second, *_ = uuids(host)
    swap = RemapOperation(moves=[move("w1", first, second), move("w2", second, first)])
    plan = plan_of(session, "", remap=swap)
    assert reasons(plan) == []
    told = [(check.workload_id, check.name, check.detail) for check in plan.checks]
    assert len(set(told)) == len(told)
    for name in ("pairs", "state", "runnable", "members", "device_memory"):
        assert [check.workload_id for check in plan.checks if check.name == name] == ["w1", "w2"], name
    assert {check.workload_id for check in plan.checks if check.name in ("driver", "mps", "chips")} == {""}


@pytest.mark.long
def test_a_plan_changes_nothing(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    for operation in ({"suspend": SuspendOperation()}, {"remap": remap_to(host, 1)}):
        plan_of(session, "w1", **operation)
    process = host.process(pid)
    assert process is not None
    assert [process.calls[call] for call in ("lock", "checkpoint", "restore", "unlock")] == [0] * 4
    session.run("c2", "w1", suspend=SuspendOperation())
    plan = plan_of(session, "w1", restore=RestoreOperation(gpu_uuids=[host.gpus[3].uuid]))
    assert reasons(plan) == []
    assert [destination.gpu_uuid for destination in plan.destinations] == [host.gpus[3].uuid]
    leases(session, ["", "", "", ""])
    process = host.process(pid)
    assert process is not None
    assert process.calls["restore"] == 0


@pytest.mark.long
def test_what_is_so_already(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    assert plan_of(session, "w1", restore=RestoreOperation()).already_there
    assert plan_of(session, "", remap=remap_to(host, 0)).already_there
    session.run("c2", "w1", suspend=SuspendOperation())
    assert plan_of(session, "w1", suspend=SuspendOperation()).already_there
    assert reasons(plan_of(session, "", remap=remap_to(host, 0))) == ["WRONG_STATE"], "it does not run there"


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver_version", "suspend", "remap"),
    [
        ("550.54.15", ["UNSUPPORTED_DRIVER"], ["UNSUPPORTED_DRIVER"]),
        pytest.param("575.57.08", [], ["UNSUPPORTED_DRIVER"], marks=pytest.mark.long),
    ],
)
def test_an_old_driver(
    connect: Connect, tmp_path: Path, driver_version: str, suspend: list[str], remap: list[str]
) -> None:
    old = SimulatedHost.create(tmp_path / "old", gpus=2, driver_version=driver_version)
    session = connect(old)
    start(session, "w1")
    assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == suspend
    assert reasons(plan_of(session, "", remap=remap_to(old, 1))) == remap
    refused = session.run("c2", "w1", remap=remap_to(old, 1))
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED


@pytest.mark.long
def test_mig(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    host.set_readings(0, mig_enabled=True)
    assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == ["UNSUPPORTED_STATE"]
    host.set_readings(0, mig_enabled=False)
    host.set_readings(1, mig_enabled=True)
    assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == []
    plan = plan_of(session, "", remap=remap_to(host, 1))
    assert reasons(plan) == ["UNSUPPORTED_STATE"]
    assert "nvidia-smi -mig 0" in plan.refusals[0].message


@pytest.mark.long
def test_a_client_of_mps(session: Session, host: SimulatedHost) -> None:
    host.set_mps_client(start(session, "w1"))
    assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == ["UNSUPPORTED_STATE"]
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED


def stop(pid: int) -> None:
    """Stops a process. The kernel does so when each of its threads comes by."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.long
def test_a_stopped_target(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    stop(pid)
    try:
        assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == ["TARGET_NOT_RUNNABLE"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == []


@pytest.mark.long
def test_a_traced_target(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) != 0:
        pytest.skip(f"no process can be traced here: {os.strerror(ctypes.get_errno())}")
    plan = plan_of(session, "w1", suspend=SuspendOperation())
    assert reasons(plan) == ["TARGET_NOT_RUNNABLE"]
    assert f"traced by process {os.getpid()}" in plan.refusals[0].message
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, 0x40000000)  # __WALL: a tracee need not be a child
    assert libc.ptrace(PTRACE_DETACH, pid, None, None) == 0
    os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freezes a process by a control group of its own, or skips the test."""
    version_1 = Path("/sys/fs/cgroup/freezer")
    group = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"leasehold-test-{pid}"
    state, freeze, thaw = (
        (group / "freezer.state", "FROZEN", "THAWED")
        if version_1.is_dir()
        else (group / "cgroup.freeze", "1", "0")
    )
    before = next(
        line.partition("::")[2] if not version_1.is_dir() else line.rpartition(":")[2]
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        if (":freezer:" in line) or (not version_1.is_dir() and line.startswith("0::"))
    )
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        state.write_text(freeze)
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no process can be frozen here: {error}")
    try:
        yield
    finally:
        state.write_text(thaw)
        (group.parent / before.lstrip("/") / "cgroup.procs").write_text(str(pid))
        deadline = time.monotonic() + 5
        while group.is_dir() and time.monotonic() < deadline:
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.02)


@pytest.mark.long
def test_a_frozen_target(session: Session, host: SimulatedHost) -> None:
    with frozen(start(session, "w1")):
        plan = plan_of(session, "w1", suspend=SuspendOperation())
        assert reasons(plan) == ["TARGET_NOT_RUNNABLE"]
        assert "frozen" in plan.refusals[0].message


@pytest.mark.long
def test_another_user_mode_driver(session: Session, host: SimulatedHost, tmp_path: Path) -> None:
    libraries = Path(host.environment()["LD_LIBRARY_PATH"].split(":")[0])
    shutil.copytree(libraries, tmp_path / "compat")
    run = counter_run("w1")
    run.spec.environment["LD_LIBRARY_PATH"] = str(tmp_path / "compat")
    session.run("c1", "w1", run=run)
    wait_counting(session, "w1")
    plan = plan_of(session, "w1", suspend=SuspendOperation())
    assert reasons(plan) == ["UNSUPPORTED_DRIVER"]
    assert str(tmp_path / "compat") in plan.refusals[0].message


@pytest.mark.long
def test_too_little_host_memory_beyond_the_reserve(connect: Connect, host: SimulatedHost) -> None:
    session = connect(host, f"host_memory_reserve_bytes = {2**60}")
    start(session, "w1")
    assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == ["INSUFFICIENT_HOST_MEMORY"]
    assert reasons(plan_of(session, "", remap=remap_to(host, 1))) == ["INSUFFICIENT_HOST_MEMORY"]


@pytest.mark.long
def test_destinations_that_are_taken_full_or_of_another_chip(connect: Connect, tmp_path: Path) -> None:
    mixed = SimulatedHost.create(tmp_path / "mixed", gpus=4, chip=["H100", "H100", "H100", "L4"])
    session = connect(mixed)
    start(session, "w1")
    start(session, "w2")
    mixed.hog(2, mixed.gpus[2].memory_bytes)
    assert reasons(plan_of(session, "", remap=remap_to(mixed, 1))) == ["NO_FREE_GPU"]
    assert reasons(plan_of(session, "", remap=remap_to(mixed, 2))) == ["INSUFFICIENT_DEVICE_MEMORY"]
    assert reasons(plan_of(session, "", remap=remap_to(mixed, 3))) == ["INCOMPATIBLE_GPU"]


@pytest.mark.long
def test_all_that_is_wrong_is_told_at_once(connect: Connect, host: SimulatedHost) -> None:
    session = connect(host, f"host_memory_reserve_bytes = {2**60}")
    start(session, "w1")
    start(session, "w2")
    host.hog(1, host.gpus[1].memory_bytes)
    assert reasons(plan_of(session, "", remap=remap_to(host, 1))) == [
        "INSUFFICIENT_HOST_MEMORY",
        "NO_FREE_GPU",
        "INSUFFICIENT_DEVICE_MEMORY",
    ]


@pytest.mark.long
def test_a_process_that_nvml_knows_and_the_driver_does_not(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    host.set_fault("get_restore_thread_id", pid, error=3)
    assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == ["NOT_A_CUDA_PROCESS"]


@pytest.mark.long
def test_memory_that_nvml_does_not_tell_by_process_is_that_of_the_gpu(
    session: Session, host: SimulatedHost
) -> None:
    start(session, "w1")
    told = plan_of(session, "w1", suspend=SuspendOperation()).host_memory.needed_bytes
    host.set_readings(0, hides_process_memory=True)
    plan = plan_of(session, "w1", suspend=SuspendOperation())
    assert reasons(plan) == []
    assert plan.host_memory.needed_bytes >= told > 0
    assert session.run("c2", "w1", suspend=SuspendOperation()).state == command_pb2.COMMAND_STATE_SUCCEEDED


@pytest.mark.long
def test_a_lock_timeout_that_would_be_endless_is_refused(session: Session, host: SimulatedHost) -> None:
    start(session, "w1")
    operation = SuspendOperation()
    operation.lock_timeout.FromSeconds(0)
    refused = session.run("c2", "w1", suspend=operation)
    assert refused.error.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    pairs = [gpu_pb2.GpuPair(old_uuid=host.gpus[0].uuid, new_uuid=host.gpus[1].uuid)]
    twice = [Move(workload_id="w1", pairs=pairs)] * 2
    refused = session.run("c3", "w1", remap=RemapOperation(moves=twice))
    assert refused.error.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT


def test_who_may_not_trace_is_told_so(tmp_path: Path) -> None:
    """The question is put where the driver's calls are made: here by a process without any right."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process as somebody else")
    program = (
        "import os, sys; from leasehold_worker.driver.target_access import obstacle;"
        "os.setgid(65534); os.setuid(65534); print(obstacle(int(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(os.getpid())], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("it belongs to user id 0: run the worker as root, with CAP_SYS"), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DriverCallUnansweredError("no answer", expired=True), errors_pb2.ERROR_REASON_DRIVER_TIMEOUT),
        (DriverCallUnansweredError("it died", expired=False), errors_pb2.ERROR_REASON_DRIVER_ERROR),
        (DriverUnavailableError("none"), errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER),
        (
            DriverError(DriverCall.TRACE_PERMISSION, 1, 304, "CUDA_ERROR_OPERATING_SYSTEM", ended=True),
            errors_pb2.ERROR_REASON_TARGET_CRASHED,
        ),
    ],
)
async def test_a_question_for_the_permission_that_is_not_answered_is_no_lack_of_it(
    host: SimulatedHost, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: ErrorReason.ValueType
) -> None:
    async def fail(_: CheckpointProcess) -> None:
        raise error

    monkeypatch.setattr(CheckpointProcess, "trace_obstacle", fail)
    identity = identify(os.getpid())
    assert identity is not None
    findings = Findings()
    await DriverChecks(Driver(), Inventory()).members(findings, [Member(identity, RUNNING)])
    assert [refusal.reason for refusal in findings.refusals] == [reason]
