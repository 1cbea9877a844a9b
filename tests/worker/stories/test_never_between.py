"""Workloads are as before or as asked, whatever dies and whenever; on a real worker."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2, eviction_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RestoreOperation, StopOperation, SuspendOperation
from leasehold.v1.workload_pb2 import Workload
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.commands.journal_file import connect

from tests.worker.conftest import end_leftovers
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
    slots,
    start,
    suspend,
)
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command

pytestmark = pytest.mark.usefixtures("with_criu")


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())


ENDS = (workload_pb2.WORKLOAD_STATE_EXITED, workload_pb2.WORKLOAD_STATE_FAILED)


def restart_host(state_directory: Path, session: Session) -> None:
    """Leaves what a worker finds on disk after its host was restarted."""
    journal = connect(state_directory / "journal.sqlite3")
    with closing(journal), journal:
        journal.execute(
            "UPDATE workloads SET record = CAST(replace(CAST(record AS TEXT), ?, 'another') AS BLOB)",
            (session.hello.boot_id,),
        )
        journal.execute("UPDATE workloads SET digest = row_digest(workload_id, record)")
    end_leftovers(state_directory)


def wait_gone(pid: int) -> None:
    """Waits until nobody has a pid any more."""
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def newest(session: Session) -> Workload:
    """The workload as it was told last."""
    told = [frame.workload_event.workload for frame in session.frames if frame.HasField("workload_event")]
    return told[-1] if told else found(session)


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", [STOP, pytest.param(CHECKPOINT, marks=pytest.mark.long)], ids=["stopped", "checkpointed"]
)
def test_who_has_no_processes_is_ended_for_good_by_the_next_start_too(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    policy: eviction_pb2.ProcessStrategy.ValueType,
) -> None:
    if policy == CHECKPOINT and isinstance(criu := real_criu(), str):
        pytest.skip(criu)
    worker = start_worker(host, crash_point="intent-stop")
    session = coordinator.next_session()
    start(session)
    assert suspend(session, "s", policy) == SUCCEEDED
    session.send(make_command("e", "w", stop=StopOperation()))
    worker.process.wait(30)
    start_worker(host)
    again = coordinator.next_session()
    ended = again.outcome("e")
    assert ended.state == SUCCEEDED, ended.error
    assert ended.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_EXITED
    again.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(again) == [FREE, FREE])


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies meanwhile"])
@pytest.mark.long
def test_a_wake_from_an_image_that_is_undone_when_the_worker_dies_is_that_image_again(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path, dies: bool
) -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    ready = tmp_path / "ready"
    worker = start_worker(host, crash_point="phase-kill")
    session = coordinator.next_session()
    start(session, [hook("up", AFTER, f"test -e {ready}")])
    assert suspend(session, "s", CHECKPOINT) == SUCCEEDED
    before = counts(read_output(session, "w"))
    session.send(make_command("r", "w", restore=RestoreOperation()))
    worker.process.wait(30)
    session.wait(lambda f: f.workload_event.workload.status.state == workload_pb2.WORKLOAD_STATE_RESTORING)
    if dies:
        roots = [
            f.workload_event.workload.status.root_pid for f in session.frames if f.HasField("workload_event")
        ]
        os.kill(roots[-1], signal.SIGKILL)
    start_worker(host)
    again = coordinator.next_session()
    outcome = again.outcome("r")
    assert (outcome.state, outcome.error.reason) == (FAILED, errors_pb2.ERROR_REASON_INTERRUPTED)
    (parked,) = outcome.workloads
    assert parked.status.state == workload_pb2.WORKLOAD_STATE_CHECKPOINTED
    assert parked.status.parked_by.process_strategy == CHECKPOINT
    again.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(again) == [FREE, FREE])
    ready.touch()
    woken = again.run("r2", "w", restore=RestoreOperation())
    assert woken.state == SUCCEEDED, woken.error
    wait_counting(again, "w")
    assert counts(read_output(again, "w"))[: len(before)] == before


@pytest.mark.long
def test_a_program_that_dies_as_soon_as_its_image_is_woken_is_that_image_again(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    start_worker(host)
    session = coordinator.next_session()
    deadly = tmp_path / "deadly"
    (root,) = start(session, [hook("up", AFTER, f"test ! -e {deadly} || sh {deadly}")])
    assert suspend(session, "s", CHECKPOINT) == SUCCEEDED
    deadly.write_text(f"kill -9 {root}; while test -d /proc/{root}; do sleep 0.01; done")
    failed = session.run("r", "w", restore=RestoreOperation())
    assert failed.error.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED, failed.error
    (parked,) = failed.workloads
    assert parked.status.state == workload_pb2.WORKLOAD_STATE_CHECKPOINTED
    assert parked.status.parked_by.process_strategy == CHECKPOINT
    session.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(session) == [FREE, FREE])


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        CUDA_SUSPEND,
        pytest.param(CHECKPOINT, marks=pytest.mark.long),
        pytest.param(STOP, marks=pytest.mark.long),
    ],
    ids=["suspend", "checkpoint", "stop"],
)
def test_who_has_ended_is_parked_by_nothing(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    policy: eviction_pb2.ProcessStrategy.ValueType,
) -> None:
    start_worker(host)
    session = coordinator.next_session()
    start(session)
    assert session.run("e", "w", stop=StopOperation()).state == SUCCEEDED
    for number in range(2):
        asked = SuspendOperation(policy=EvictionPolicy(process_strategy=policy), force=True)
        refused = session.run(f"s{number}", "w", suspend=asked)
        assert refused.error.reason == errors_pb2.ERROR_REASON_WRONG_STATE, refused


@pytest.mark.long
def test_who_is_wedged_is_not_taken_for_parked(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    start_worker(host)
    session = coordinator.next_session()
    (member,) = start(session)
    assert suspend(session, "s", CUDA_SUSPEND) == SUCCEEDED
    host.set_fault("restore", member, error=2)
    failed = session.run("r", "w", restore=RestoreOperation())
    assert failed.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_WEDGED
    refused = session.run("s2", "w", suspend=SuspendOperation())
    assert refused.error.reason == errors_pb2.ERROR_REASON_WRONG_STATE, refused


@pytest.mark.parametrize("point", ["phase-restore", "phase-hooks:2"])
@pytest.mark.long
def test_a_host_that_restarts_while_an_image_is_woken_has_it_still(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path, point: str
) -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    worker = start_worker(host, crash_point=point)
    session = coordinator.next_session()
    (root,) = start(session, [hook("down", BEFORE, "true"), hook("up", AFTER, "true")])
    assert suspend(session, "s", CHECKPOINT) == SUCCEEDED
    session.send(make_command("r", "w", restore=RestoreOperation()))
    worker.process.wait(30)
    restart_host(tmp_path / "state", session)
    wait_gone(root)
    start_worker(host)
    again = coordinator.next_session()
    (parked,) = again.outcome("r").workloads
    assert parked.status.state == workload_pb2.WORKLOAD_STATE_CHECKPOINTED
    again.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(again) == [FREE, FREE])
    (image,) = (tmp_path / "state/images/w").iterdir()
    assert image.name == parked.status.checkpoint_id
    if point == "phase-restore":  # the simulated driver knows no more of who ended while it ran
        woken = again.run("r2", "w", restore=RestoreOperation())
        assert woken.state == SUCCEEDED, woken.error
        wait_counting(again, "w")


@pytest.mark.parametrize("restarts", [False, True], ids=["worker", "host"])
@pytest.mark.long
def test_processes_that_die_while_their_image_is_written_end_the_workload(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path, restarts: bool
) -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    worker = start_worker(host, crash_point="intent-image")
    session = coordinator.next_session()
    (root,) = start(session)
    assert suspend(session, "s0", CUDA_SUSPEND) == SUCCEEDED
    assert session.run("r0", "w", restore=RestoreOperation()).state == SUCCEEDED
    policy = EvictionPolicy(process_strategy=CHECKPOINT)
    session.send(make_command("c", "w", suspend=SuspendOperation(policy=policy, force=True)))
    worker.process.wait(30)
    if restarts:
        restart_host(tmp_path / "state", session)
    else:
        os.kill(root, signal.SIGKILL)
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("c").error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    again.wait(lambda _: newest(again).status.state in ENDS)
    if restarts:
        assert newest(again).status.error.reason == errors_pb2.ERROR_REASON_HOST_REBOOTED
    again.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(again) == [FREE, FREE])


@pytest.mark.long
def test_who_is_restored_and_dies_while_it_is_put_to_sleep_has_ended(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    now = tmp_path / "now"
    start_worker(host)
    session = coordinator.next_session()
    kill = "kill -9 {members}; while kill -0 {members} 2>/dev/null; do sleep 0.01; done"
    start(session, [hook("fatal", BEFORE, f"test -e {now} || exit 0; {kill}")])
    assert suspend(session, "s0", CUDA_SUSPEND) == SUCCEEDED
    assert session.run("r0", "w", restore=RestoreOperation()).state == SUCCEEDED
    now.touch()
    policy = EvictionPolicy(process_strategy=KEEP_RUNNING)
    died = session.run("k", "w", suspend=SuspendOperation(policy=policy, force=True))
    assert died.state == FAILED, died  # by the reason with which its end was noticed
    session.wait(lambda _: newest(session).status.state == workload_pb2.WORKLOAD_STATE_EXITED)
    session.wait(lambda f: bool(f.worker_load.gpu_leases) and slots(session) == [FREE, FREE])
