"""What a worker finds after its death that concerns several workloads, a stop, or no command at all."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, eviction_pb2, gpu_pb2, lease_pb2, workload_pb2
from leasehold.v1.operation_pb2 import (
    CordonOperation,
    Move,
    RemapOperation,
    RestoreOperation,
    RunOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold_simgpu import SimulatedHost, Timing

from tests.worker.conftest import WorkerProcess
from tests.worker.counters import (
    counter_run,
    counters,
    counts,
    read_output,
    unhandled_run,
    until,
    wait_counting,
)
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command
from tests.worker.unreadable_files import require_bind_mounts, unreadable

SUCCEEDED, FAILED, REJECTED, CANCELLED = (
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_REJECTED,
    command_pb2.COMMAND_STATE_CANCELLED,
)
RUNNING, SUSPENDED, EXITED, UNKNOWN = (
    workload_pb2.WORKLOAD_STATE_RUNNING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_EXITED,
    workload_pb2.WORKLOAD_STATE_UNKNOWN,
)
FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED

Start = Callable[..., WorkerProcess]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


def pids(session: Session) -> list[int]:
    """The first processes of w1 and w2."""
    return [session.outcome(command_id).workloads[0].status.root_pid for command_id in ("c1", "c2")]


def start_two(
    start_worker: Start, coordinator: ScriptedCoordinator, host: SimulatedHost, point: str
) -> tuple[WorkerProcess, Session]:
    """A worker that will die, with w1 on GPU 0 and w2 on GPU 1."""
    doomed = start_worker(host, crash_point=point)
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    session.run("c2", "w2", run=counter_run("two"))
    wait_counting(session, "w1")
    wait_counting(session, "w2")
    return doomed, session


def move(host: SimulatedHost, **places: tuple[int, int]) -> RemapOperation:
    """A remap of workloads from a slot to a slot."""
    return RemapOperation(
        moves=[
            Move(
                workload_id=name,
                pairs=[gpu_pb2.GpuPair(old_uuid=host.gpus[old].uuid, new_uuid=host.gpus[new].uuid)],
            )
            for name, (old, new) in places.items()
        ]
    )


def check_place(again: Session, host: SimulatedHost, workload_id: str, gpu: int) -> None:
    """The workload runs on the GPU, has a lease there, and has lost nothing."""
    uuid = host.gpus[gpu].uuid
    text = wait_counting(again, workload_id, uuid)
    assert counts(text) == list(range(counts(text)[0], counts(text)[-1] + 1))
    again.wait(
        lambda f: any(
            (lease.gpu_uuid, lease.workload_id, lease.state) == (uuid, workload_id, LEASED)
            for lease in f.worker_load.gpu_leases
        )
    )


@pytest.mark.parametrize(
    ("crash_point", "swapped"),
    [
        ("phase-checkpoint", False),
        ("phase-verify", False),
        ("intent-restore", True),
        ("phase-unlock", True),
        ("operation-ended:3", True),
        ("outcome-journaled:3", True),
    ],
)
@pytest.mark.long
def test_a_swap_ends_on_one_side(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    crash_point: str,
    swapped: bool,
) -> None:
    doomed, session = start_two(start_worker, coordinator, host, crash_point)
    session.send(make_command("c3", "w1", remap=move(host, w1=(0, 1), w2=(1, 0))))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("c3").state == (SUCCEEDED if swapped else FAILED)
    check_place(again, host, "w1", int(swapped))
    check_place(again, host, "w2", int(not swapped))


@pytest.mark.parametrize(
    "crash_point",
    ["phase-checkpoint", "phase-verify", "intent-restore", "phase-unlock"],
)
@pytest.mark.long
def test_a_workload_of_a_move_survives_the_other(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    crash_point: str,
) -> None:
    doomed, session = start_two(start_worker, coordinator, host, crash_point)
    first, _ = pids(session)
    session.send(make_command("c3", "w1", remap=move(host, w1=(0, 2), w2=(1, 3))))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    os.kill(first, signal.SIGKILL)
    start_worker(host)
    again = coordinator.next_session()
    outcome = again.outcome("c3")
    assert outcome.state == FAILED
    assert "workload one has ended" in outcome.error.message
    status = next(found for found in outcome.workloads if found.workload_id == "w2").status
    assert status.state == RUNNING
    check_place(again, host, "w2", 3 if crash_point in ("intent-restore", "phase-unlock") else 1)
    assert again.run("c5", "w2", suspend=SuspendOperation()).state == SUCCEEDED


@pytest.mark.long
def test_a_workload_that_a_remap_left_parked_keeps_its_gpu_until_it_runs_again(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    doomed, session = start_two(start_worker, coordinator, host, "phase-verify")
    session.send(make_command("c3", "w1", remap=move(host, w1=(0, 2))))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    host.hog(0, host.gpus[0].memory_bytes)
    worker = start_worker(host)
    again = coordinator.next_session()
    outcome = again.outcome("c3")
    assert outcome.state == FAILED
    status = outcome.workloads[0].status
    assert (status.state, list(status.lease.gpu_uuids)) == (UNKNOWN, [host.gpus[0].uuid])
    taker = counter_run("taker")
    taker.gpu_uuids.append(host.gpus[0].uuid)
    assert again.run("c4", "w4", run=taker).error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    refused = again.run("c5", "w1", restore=RestoreOperation(gpu_uuids=[host.gpus[0].uuid]))
    assert refused.state == REJECTED
    worker.kill()
    host.hog(0, 0)
    start_worker(host)
    last = coordinator.next_session()
    until(last, "w1", RUNNING)
    check_place(last, host, "w1", 0)


@pytest.mark.long
def test_a_restore_of_what_a_remap_left_parked_that_fails_keeps_its_gpu(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    doomed, session = start_two(start_worker, coordinator, host, "phase-verify")
    first, _ = pids(session)
    session.send(make_command("c3", "w1", remap=move(host, w1=(0, 2))))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    host.set_fault("restore", first, error=801)
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("c3").workloads[0].status.state == UNKNOWN
    failed = again.run("c4", "w1", restore=RestoreOperation())
    assert failed.state == FAILED
    status = failed.workloads[0].status
    assert (status.state, list(status.lease.gpu_uuids)) == (UNKNOWN, [host.gpus[0].uuid])
    host.clear_faults()
    # A cordon keeps no workload from the GPUs that it holds.
    assert again.run("c5", "", cordon=CordonOperation(reason="a fan")).state == SUCCEEDED
    assert again.run("c6", "w1", restore=RestoreOperation()).state == SUCCEEDED
    check_place(again, host, "w1", 0)


@pytest.mark.long
def test_a_refusal_that_passes_does_not_leave_a_workload_parked(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    doomed, session = start_two(start_worker, coordinator, host, "phase-verify")
    first, _ = pids(session)
    session.send(make_command("c3", "w1", remap=move(host, w1=(0, 2))))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    host.set_fault("restore", first, error=801, times=1)
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("c3").workloads[0].status.state == RUNNING
    check_place(again, host, "w1", 0)


@pytest.mark.long
def test_members_that_were_moved_and_parked_again_before_the_worker_died_are_found(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    # The unlock on the new GPU fails, so it is parked there; the worker dies before it is brought back.
    doomed, session = start_two(start_worker, coordinator, host, "phase-restore:2")
    first, _ = pids(session)
    host.set_fault("unlock", first, error=801, times=2)
    session.send(make_command("c3", "w1", remap=move(host, w1=(0, 2))))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("c3").state == SUCCEEDED
    check_place(again, host, "w1", 2)


@pytest.mark.long
def test_a_workload_that_recovery_restored_is_parked_before_it_is_killed(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
) -> None:
    doomed = start_worker(host, crash_point="phase-checkpoint")
    session = coordinator.next_session()
    session.run("c1", "w1", run=unhandled_run("one"))
    wait_counting(session, "w1")
    session.send(make_command("c3", "w1", suspend=SuspendOperation()))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    assert again.outcome("c3").state == FAILED
    stopped = again.run("c4", "w1", stop=StopOperation())
    phases = [phase.phase for phase in stopped.result.phases]
    assert phases.index("checkpoint") < phases.index("kill")


STOP_TIMEOUT = timedelta(seconds=10)
"""Passes after the worker's death and not before, even on a busy machine."""

STUBBORN = "trap 'echo term' TERM; echo ready; while :; do sleep 0.02; done"


@pytest.mark.parametrize("crash_point", ["intent-stop", "phase-terminate", "phase-kill"])
@pytest.mark.long
def test_a_stop_is_finished_whatever_its_timeout(
    start_worker: Start, coordinator: ScriptedCoordinator, crash_point: str
) -> None:
    doomed = start_worker(None, crash_point=crash_point)
    session = coordinator.next_session()
    spec = workload_pb2.WorkloadSpec(arguments=["sh", "-c", STUBBORN])
    session.run("c1", "w1", run=RunOperation(name="one", spec=spec))
    deadline = time.monotonic() + 30
    while "ready" not in read_output(session, "w1"):
        assert time.monotonic() < deadline
    stop = make_command("c2", "w1", stop=StopOperation(grace=duration_pb2.Duration(nanos=300_000_000)))
    stop.timeout.FromTimedelta(STOP_TIMEOUT)
    session.send(stop)
    sent = time.monotonic()
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    time.sleep(max(0.0, sent + STOP_TIMEOUT.total_seconds() - time.monotonic()))
    start_worker(None)
    again = coordinator.next_session()
    assert again.outcome("c2").state == SUCCEEDED
    until(again, "w1", EXITED)
    assert read_output(again, "w1").count("term") <= 1


@pytest.mark.long
def test_members_that_a_stopping_worker_left_locked_run_again(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
) -> None:
    worker = start_worker(host, stop_workloads="park")
    session = coordinator.next_session()
    pid = session.run("c1", "w1", run=counter_run("one")).workloads[0].status.root_pid
    wait_counting(session, "w1")
    session.acknowledge("c1")
    host.set_fault("checkpoint", pid, hang=True)
    worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 30
    while not any(process.calls["checkpoint"] for process in counters(host)):
        assert time.monotonic() < deadline
    worker.kill()
    host.clear_faults(pid=pid)
    start_worker(host)
    again = coordinator.next_session()
    until(again, "w1", RUNNING)
    check_place(again, host, "w1", 0)


@pytest.mark.long
def test_a_command_that_is_cancelled_while_others_are_settled_is_not_begun(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
) -> None:
    doomed = start_worker(host, crash_point="command-journaled:2")
    session = coordinator.next_session()
    pid = session.run("c1", "w1", run=counter_run("one")).workloads[0].status.root_pid
    wait_counting(session, "w1")
    command = make_command("c3", "w1", suspend=SuspendOperation())
    session.send(command)
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    host.set_fault("get_state", pid, delay_s=0.5)
    start_worker(host)
    again = coordinator.next_session()
    again.send(command, cancel=True)
    assert again.outcome("c3").state == CANCELLED
    host.clear_faults(pid=pid)
    check_place(again, host, "w1", 0)


def test_a_run_before_a_reboot_is_not_said_to_have_begun_never(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
) -> None:
    doomed = start_worker(host, crash_point="program-started")
    session = coordinator.next_session()
    session.send(make_command("c1", "w1", run=counter_run("one")))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    record = tmp_path / "state/workloads/w1/process"
    record.write_text(record.read_text().replace(session.hello.boot_id, "another"))
    start_worker(host)
    outcome = coordinator.next_session().outcome("c1")
    assert outcome.state == FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_HOST_REBOOTED


@pytest.mark.parametrize("name", ["process", "exit"])
def test_a_run_whose_record_can_not_be_read_ends_the_start_with_the_reason(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
    name: str,
) -> None:
    require_bind_mounts(tmp_path)
    doomed = start_worker(host, crash_point="program-started")
    session = coordinator.next_session()
    session.send(make_command("c1", "w1", run=counter_run("one")))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    with unreadable(tmp_path / "state/workloads/w1" / name):
        worker = start_worker(host)
        assert worker.process.wait(timeout=30) != 0
    log = worker.log.read_text()
    assert "workload one can't be read or cancelled (Input/output error): check the disk" in log
    assert "Traceback" not in log


def test_a_restart_whose_record_can_not_be_read_keeps_its_gpus_and_says_what_to_do(
    start_worker: Start,
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
) -> None:
    require_bind_mounts(tmp_path)
    doomed = start_worker(host, crash_point="program-started:2")
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    by_stop = SuspendOperation(
        policy=eviction_pb2.EvictionPolicy(process_strategy=eviction_pb2.PROCESS_STRATEGY_STOP), force=True
    )
    stopped = session.run("c2", "w1", suspend=by_stop)
    assert stopped.state == SUCCEEDED, stopped.error
    session.send(make_command("c3", "w1", restore=RestoreOperation()))
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    with unreadable(tmp_path / "state/workloads/w1/process"):
        worker = start_worker(host)
        again = coordinator.next_session()
        outcome = again.outcome("c3")
        assert outcome.state == FAILED
        assert outcome.error.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
        assert f"check the disk of {tmp_path}/state/workloads/w1" in outcome.error.message
        until(again, "w1", UNKNOWN)
        again.wait(lambda frame: LEASED in [lease.state for lease in frame.worker_load.gpu_leases])
    assert "Traceback" not in worker.log.read_text()
    worker.kill()
    worker = start_worker(host)
    session = coordinator.next_session()
    until(session, "w1", workload_pb2.WORKLOAD_STATE_STOPPED)
    assert "the program of workload w1 still runs as process" in worker.log.read_text()
