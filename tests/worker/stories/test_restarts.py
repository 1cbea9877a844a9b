"""A worker that is killed and started again on the same state directory."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, eviction_pb2, gpu_pb2, lease_pb2, workload_pb2
from leasehold.v1.operation_pb2 import (
    Move,
    RemapOperation,
    RestoreOperation,
    RunOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.worker.v1.session_pb2 import CommandUpdate
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.commands.journal_file import connect
from leasehold_worker.host.processes import identify, is_alive, send_signal

from tests.worker.conftest import WorkerProcess, end_leftovers
from tests.worker.counters import (
    counter_run,
    counters,
    counts,
    read_output,
    slots,
    until,
    wait_counting,
    workload,
)
from tests.worker.criu_cases import criu_setting, real_criu
from tests.worker.operations.test_acquisition import helper_run
from tests.worker.operations.test_handler import calls_of
from tests.worker.parking_cases import BEFORE, hook
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command
from tests.worker.stories.test_membership import wait_until

SUCCEEDED, FAILED, REJECTED = (
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_REJECTED,
)
RUNNING, SUSPENDED, EXITED = (
    workload_pb2.WORKLOAD_STATE_RUNNING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_EXITED,
)
FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED

Start = Callable[..., WorkerProcess]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


def test_workloads_and_leases_outlive_the_worker(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    session.run("c2", "w2", run=counter_run("two", 2))
    wait_counting(session, "w1")
    wait_counting(session, "w2")
    parked = session.run("c3", "w1", suspend=SuspendOperation()).workloads[0].status
    before = session.run("c4", "w2", suspend=SuspendOperation(lock_timeout=duration_pb2.Duration()))
    assert before.state == REJECTED
    for command_id in ("c1", "c2", "c3", "c4"):
        session.acknowledge(command_id)
    worker.kill()

    start_worker(host)
    again = coordinator.next_session()
    assert again.hello.instance_id != session.hello.instance_id
    assert slots(again) == [FREE, LEASED, LEASED, FREE]
    assert not again.hello.commands_in_flight
    assert workload(again, "w1").status.state == SUSPENDED
    assert workload(again, "w1").status.parked_bytes == parked.parked_bytes
    assert workload(again, "w1").status.generation > parked.generation
    two = workload(again, "w2")
    assert two.name == "two"
    assert two.spec.arguments == before.workloads[0].spec.arguments
    assert two.status.lease.lease_id == before.workloads[0].status.lease.lease_id
    assert two.status.lease.fencing_token == before.workloads[0].status.lease.fencing_token
    text = wait_counting(again, "w2")
    assert counts(text) == list(range(counts(text)[0], counts(text)[-1] + 1))
    restored = again.run("c5", "w1", restore=RestoreOperation())
    assert restored.state == SUCCEEDED, restored
    text = wait_counting(again, "w1")
    assert counts(text) == list(range(counts(text)[0], counts(text)[-1] + 1))
    stopped = again.run("c6", "w2", stop=StopOperation())
    assert stopped.workloads[0].status.HasField("exit"), "the launcher has kept it"


@pytest.mark.long
def test_workloads_outlive_the_loss_of_the_journal(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    session.run("c2", "w2", run=counter_run("two", 2))
    wait_counting(session, "w1")
    wait_counting(session, "w2")
    assert session.run("c3", "w2", suspend=SuspendOperation()).state == SUCCEEDED
    pair = gpu_pb2.GpuPair(old_uuid=host.gpus[0].uuid, new_uuid=host.gpus[3].uuid)
    moved = session.run("c4", "w1", remap=RemapOperation(moves=[Move(workload_id="w1", pairs=[pair])]))
    assert moved.state == SUCCEEDED
    worker.kill()
    for path in (tmp_path / "state").glob("journal.sqlite3*"):
        path.unlink()
    again_worker = start_worker(host)
    again = coordinator.next_session()
    assert workload(again, "w1").spec.arguments[1:] == counter_run("one").spec.arguments[1:]
    assert slots(again)[3] == LEASED
    wait_counting(again, "w1", host.gpus[3].uuid)
    until(again, "w2", SUSPENDED)
    again.wait(lambda f: [lease.state for lease in f.worker_load.gpu_leases] == [FREE, FREE, FREE, LEASED])
    assert again.run("c5", "w2", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(again, "w2")
    assert "workload two (w2) runs as process" in again_worker.log.read_text()
    assert again.run("c6", "w1", stop=StopOperation()).state == SUCCEEDED
    until(again, "w1", EXITED)


@pytest.mark.long
def test_a_program_that_lives_though_its_workload_has_ended_is_reported(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    worker.kill()
    with connect(tmp_path / "state/journal.sqlite3") as journal:
        states = [f'"state":{state},"generation"' for state in (RUNNING, EXITED)]
        journal.execute(
            "UPDATE workloads SET record = CAST(replace(CAST(record AS TEXT), ?, ?) AS BLOB)", states
        )
        journal.execute("UPDATE workloads SET digest = row_digest(workload_id, record)")
    journal.close()
    again = start_worker(host)
    assert workload(coordinator.next_session(), "w1").status.state == EXITED
    assert "the program of workload w1 still runs" in again.log.read_text()


def test_marked_processes_that_the_journal_does_not_know_are_reported(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    socket = tmp_path / "state/worker.sock"
    marks = [
        {"LEASEHOLD_WORKLOAD_ID": f"lost-{ours}", "LEASEHOLD_SOCKET": ours} for ours in (str(socket), "x")
    ]
    processes = [subprocess.Popen(["sleep", "300"], env={**os.environ, **mark}) for mark in marks]
    try:
        worker = start_worker(None)
        coordinator.next_session()
        log = worker.log.read_text()
        assert f"process {processes[0].pid} carries the mark of the unknown workload 'lost-" in log
        assert "lost-x" not in log
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_graceful_stop_leaves_the_workloads(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host, stop_workloads="leave")
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    assert worker.stop() == 0
    assert len(counters(host)) == 1
    start_worker(host)
    wait_counting(coordinator.next_session(), "w1")


@pytest.mark.long
def test_a_stop_can_park_the_workloads(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host, stop_workloads="park")
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    assert worker.stop() == 0
    assert [process.state.name for process in counters(host)] == ["CHECKPOINTED"]
    start_worker(host)
    again = coordinator.next_session()
    assert slots(again) == [FREE] * 4
    assert workload(again, "w1").status.state == SUSPENDED


@pytest.mark.long
def test_nobody_gets_the_gpus_that_the_stop_of_a_worker_frees(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host, stop_workloads="park")
    session = coordinator.next_session()
    assert session.run("c1", "helper", run=helper_run("helper", 1)).state == SUCCEEDED
    wait_counting(session, "helper")
    assert session.run("c2", "large", run=counter_run("large", 3)).state == SUCCEEDED
    wait_counting(session, "large")
    slow = counter_run("slow")
    slow.spec.hooks.append(hook("slow", BEFORE, "sleep 1"))  # in the meantime, the GPUs of the other are free
    assert session.run("c3", "slow", run=slow).state == SUCCEEDED  # it preempts the helper
    wait_counting(session, "slow")
    assert worker.stop() == 0
    assert [process.state.name for process in counters(host)] == ["CHECKPOINTED"] * 3


def test_how_a_workload_ended_while_the_worker_was_away_is_told(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    worker = start_worker(None)
    session = coordinator.next_session()
    gate = tmp_path / "gate"
    spec = workload_pb2.WorkloadSpec(
        arguments=["sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.01; done; echo late; exit 7"]
    )
    session.run("c1", "w1", run=RunOperation(name="one", spec=spec))
    worker.kill()
    gate.touch()
    start_worker(None)
    again = coordinator.next_session()
    assert until(again, "w1", EXITED).status.exit.code == 7
    assert read_output(again, "w1") == "late\n"


@pytest.mark.long
def test_after_a_reboot_everything_is_reported_gone(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    session.run("c2", "w2", run=counter_run("two"))
    wait_counting(session, "w2")
    session.run("c3", "w2", suspend=SuspendOperation())
    worker.kill()
    with connect(tmp_path / "state/journal.sqlite3") as journal:
        journal.execute(
            "UPDATE workloads SET record = CAST(replace(CAST(record AS TEXT), ?, 'another') AS BLOB)",
            (session.hello.boot_id,),
        )
        journal.execute("UPDATE workloads SET digest = row_digest(workload_id, record)")
    journal.close()
    end_leftovers(tmp_path / "state")  # as the reboot did
    start_worker(host)
    again = coordinator.next_session()
    assert slots(again) == [FREE] * 4
    for workload_id, held in (("w1", host.gpus[0].uuid), ("w2", "suspended")):
        status = workload(again, workload_id).status
        assert status.state == workload_pb2.WORKLOAD_STATE_FAILED
        assert status.error.reason == errors_pb2.ERROR_REASON_HOST_REBOOTED
        assert held in status.error.message


@pytest.mark.long
def test_what_is_parked_without_processes_outlives_a_reboot(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    settings = tmp_path / "worker.toml"
    settings.write_text(criu_setting())
    worker = start_worker(host, config=str(settings))
    session = coordinator.next_session()
    strategies = {"w1": eviction_pb2.PROCESS_STRATEGY_STOP}
    if not isinstance(real_criu(), str):
        strategies["w2"] = eviction_pb2.PROCESS_STRATEGY_CHECKPOINT
    for workload_id, strategy in strategies.items():
        session.run(f"run-{workload_id}", workload_id, run=counter_run(workload_id))
        wait_counting(session, workload_id)
        policy = eviction_pb2.EvictionPolicy(process_strategy=strategy)
        suspend = SuspendOperation(policy=policy, force=True)
        assert session.run(f"park-{workload_id}", workload_id, suspend=suspend).state == SUCCEEDED
    worker.kill()
    with connect(tmp_path / "state/journal.sqlite3") as journal:
        journal.execute(
            "UPDATE workloads SET record = CAST(replace(CAST(record AS TEXT), ?, 'another') AS BLOB)",
            (session.hello.boot_id,),
        )
        journal.execute("UPDATE workloads SET digest = row_digest(workload_id, record)")
    journal.close()
    start_worker(host, config=str(settings))
    again = coordinator.next_session()
    assert slots(again) == [FREE] * 4
    for workload_id, strategy in strategies.items():
        assert workload(again, workload_id).status.parked_by.process_strategy == strategy
        woken = again.run(f"wake-{workload_id}", workload_id, restore=RestoreOperation())
        assert woken.state == SUCCEEDED, woken.error
        wait_counting(again, workload_id)


@pytest.mark.long
def test_a_repeated_command_is_answered_from_the_journal(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    first = session.run("c1", "w1", run=counter_run("one"))
    worker.kill()
    start_worker(host)
    again = coordinator.next_session()
    assert list(again.hello.commands_unacknowledged) == ["c1"]
    assert again.outcome("c1").result == first.result
    again.acknowledge("c1")
    seen = len(again.frames)
    again.send(make_command("c1", "w1", run=counter_run("one")))
    again.run("c2", "w2", run=counter_run("two"))
    repeated = [f.command_update for f in again.frames[seen:] if f.command_update.command_id == "c1"]
    assert [update.state for update in repeated] == [SUCCEEDED]
    assert len(counters(host)) <= 2


CRASHES_OF_RUN = [
    pytest.param("command-received", marks=pytest.mark.long),
    pytest.param("command-journaled", marks=pytest.mark.long),
    pytest.param("intent-run", marks=pytest.mark.long),
    "program-started",
    pytest.param("operation-ended", marks=pytest.mark.long),
    pytest.param("outcome-journaled", marks=pytest.mark.long),
    pytest.param("outcome-told", marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.parametrize("crash_point", CRASHES_OF_RUN)
def test_a_run_is_done_once_wherever_the_worker_dies(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, crash_point: str
) -> None:
    worker = start_worker(host, crash_point=crash_point)
    session = coordinator.next_session()
    command = make_command("c1", "w1", run=counter_run("one"))
    session.send(command)
    assert worker.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    again.send(command)
    outcome = again.outcome("c1")
    running = outcome.state == SUCCEEDED
    if running:
        wait_counting(again, "w1")
    else:
        assert outcome.error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
        assert crash_point == "intent-run"
    wanted = [LEASED if running else FREE, FREE, FREE, FREE]
    again.wait(lambda frame: [lease.state for lease in frame.worker_load.gpu_leases] == wanted)
    assert len(counters(host)) == running


@pytest.fixture
def crash(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> Callable[..., tuple[Session, CommandUpdate]]:
    """A worker with a running counter and perhaps a parked one, that dies in a command and comes back."""

    def run(crash_point: str, parked: bool = False, **operation: object) -> tuple[Session, CommandUpdate]:
        doomed = start_worker(host, crash_point=crash_point)
        session = coordinator.next_session()
        session.run("c1", "w1", run=counter_run("one"))
        wait_counting(session, "w1")
        if parked:
            session.run("c2", "w1", suspend=SuspendOperation())
        session.send(make_command("c3", "w1", **operation))
        assert doomed.process.wait(timeout=30) == -signal.SIGKILL
        start_worker(host)
        again = coordinator.next_session()
        assert "c3" in [*again.hello.commands_in_flight, *again.hello.commands_unacknowledged]
        return again, again.outcome("c3")

    return run


def check_whole(again: Session, host: SimulatedHost, outcome: CommandUpdate, gpu: int | None) -> None:
    """The workload is where the outcome says, on one side, and has lost nothing.

    Args:
        again: The session after the restart.
        host: The host.
        outcome: Of the command.
        gpu: Where it is to be; None where it is to be parked.
    """
    status = outcome.workloads[0].status
    (process,) = counters(host)
    assert status.state == (SUSPENDED if gpu is None else RUNNING), outcome
    assert process.state.name == ("CHECKPOINTED" if gpu is None else "RUNNING")
    assert list(status.lease.gpu_uuids) == ([] if gpu is None else [host.gpus[gpu].uuid])
    wanted = [LEASED if slot == gpu else FREE for slot in range(4)]
    again.wait(lambda f: [lease.state for lease in f.worker_load.gpu_leases] == wanted)
    if gpu is None:
        restored = again.run("c4", "w1", restore=RestoreOperation())
        assert restored.state == SUCCEEDED, restored
    text = wait_counting(again, "w1", None if gpu is None else host.gpus[gpu].uuid)
    assert counts(text) == list(range(counts(text)[0], counts(text)[-1] + 1))
    assert again.run("c5", "w1", suspend=SuspendOperation()).state == SUCCEEDED


Crash = Callable[..., tuple[Session, CommandUpdate]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("crash_point", "done"),
    [
        pytest.param("command-journaled:2", True, marks=pytest.mark.long),
        pytest.param("intent-lock", False, marks=pytest.mark.long),
        pytest.param("phase-lock", False, marks=pytest.mark.long),
        pytest.param("intent-checkpoint", False, marks=pytest.mark.long),
        ("phase-checkpoint", False),
        pytest.param("phase-verify", True, marks=pytest.mark.long),
        pytest.param("operation-ended:2", True, marks=pytest.mark.long),
        pytest.param("outcome-journaled:2", True, marks=pytest.mark.long),
        pytest.param("outcome-told:2", True, marks=pytest.mark.long),
    ],
)
def test_a_suspend_ends_on_one_side_wherever_the_worker_dies(
    crash: Crash, host: SimulatedHost, crash_point: str, done: bool
) -> None:
    again, outcome = crash(crash_point, suspend=SuspendOperation())
    assert outcome.state == (SUCCEEDED if done else FAILED), outcome
    assert done or outcome.error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    check_whole(again, host, outcome, None if done else 0)


@pytest.mark.parametrize(
    ("crash_point", "done"),
    [
        ("command-journaled:3", True),
        ("intent-restore", False),
        ("phase-restore", False),
        ("phase-unlock", True),
        ("phase-verify:2", True),
        ("operation-ended:3", True),
        ("outcome-journaled:3", True),
        ("outcome-told:3", True),
    ],
)
@pytest.mark.long
def test_a_restore_ends_on_one_side_wherever_the_worker_dies(
    crash: Crash, host: SimulatedHost, crash_point: str, done: bool
) -> None:
    elsewhere = RestoreOperation(gpu_uuids=[host.gpus[2].uuid])
    again, outcome = crash(crash_point, parked=True, restore=elsewhere)
    assert outcome.state == (SUCCEEDED if done else FAILED), outcome
    assert done or outcome.error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    check_whole(again, host, outcome, 2 if done else None)


@pytest.mark.parametrize(
    ("crash_point", "gpu"),
    [
        ("intent-lock", 0),
        ("intent-checkpoint", 0),
        ("phase-checkpoint", 0),
        ("phase-verify", 0),
        ("intent-restore", 2),
        ("phase-restore", 2),
        ("phase-unlock", 2),
        ("phase-verify:2", 2),
        ("operation-ended:2", 2),
        ("outcome-journaled:2", 2),
    ],
)
@pytest.mark.long
def test_a_workload_runs_after_a_remap_wherever_the_worker_dies(
    crash: Crash, host: SimulatedHost, crash_point: str, gpu: int
) -> None:
    pair = gpu_pb2.GpuPair(old_uuid=host.gpus[0].uuid, new_uuid=host.gpus[2].uuid)
    remap = RemapOperation(moves=[Move(workload_id="w1", pairs=[pair])])
    again, outcome = crash(crash_point, remap=remap)
    assert outcome.state == (SUCCEEDED if gpu == 2 else FAILED), outcome
    check_whole(again, host, outcome, gpu)


@pytest.mark.parametrize("crash_point", ["leases-rebuilt", "workload-probed", "command-settled"])
@pytest.mark.long
def test_a_worker_that_dies_while_it_settles_settles_at_the_next_start(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, crash_point: str
) -> None:
    worker = start_worker(host, crash_point="phase-checkpoint")
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    session.send(make_command("c3", "w1", suspend=SuspendOperation()))
    assert worker.process.wait(timeout=30) == -signal.SIGKILL
    doomed = start_worker(host, crash_point=crash_point, coordinator="127.0.0.1:9")
    assert doomed.process.wait(timeout=30) == -signal.SIGKILL
    start_worker(host)
    again = coordinator.next_session()
    outcome = again.outcome("c3")
    assert outcome.state == FAILED
    check_whole(again, host, outcome, 0)


@pytest.mark.long
def test_a_workload_that_is_wedged_stays_so(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    """The driver calls it CHECKPOINTED, and a second restore would be made for nothing."""
    worker = start_worker(host)
    session = coordinator.next_session()
    pid = session.run("c1", "w1", run=counter_run("w1")).workloads[0].status.root_pid
    wait_counting(session, "w1")
    session.run("c2", "w1", suspend=SuspendOperation())
    host.set_fault("restore", pid, error=2, times=1)
    wedged = session.run("c3", "w1", restore=RestoreOperation())
    assert wedged.error.reason == errors_pb2.ERROR_REASON_MEMBER_WEDGED
    host.clear_faults()
    session.acknowledge("c3")
    worker.kill()
    queries = calls_of(host, pid)["get_state"]
    start_worker(host)
    again = coordinator.next_session()
    wait_until(lambda: calls_of(host, pid)["get_state"] >= queries + 2, "the worker has looked at it twice")
    assert again.run("c4", "w2", run=counter_run("w2")).state == SUCCEEDED
    refused = again.run("c5", "w1", restore=RestoreOperation())
    assert refused.state == REJECTED, refused
    assert "WEDGED" in refused.error.message
    assert "stop it" in refused.error.message
    status = refused.workloads[0].status
    assert [member.state for member in status.members] == [workload_pb2.MEMBER_STATE_WEDGED]
    assert status.error.reason == errors_pb2.ERROR_REASON_MEMBER_WEDGED
    assert calls_of(host, pid)["restore"] == 1
    assert again.run("c6", "w1", stop=StopOperation(force=True)).state == SUCCEEDED


@pytest.mark.long
def test_a_workload_that_replaces_its_own_folder_keeps_no_worker_from_starting(
    start_worker: Start, host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    (counter,) = counters(host)
    folders = tmp_path / "state/workloads"
    (folders / "w1").rename(tmp_path / "w1")
    (folders / "w1").touch()
    (folders / "notes.txt").touch()
    worker.kill()
    start_worker(host)
    try:
        session = coordinator.next_session()
        assert [told.status.state for told in session.hello.workloads] == [RUNNING]
    finally:
        os.kill(counter.pid, signal.SIGKILL)
    until(session, "w1", EXITED)


@pytest.mark.long
def test_a_program_that_kills_its_launcher_leaves_no_orphan_behind(
    session: Session, host: SimulatedHost, tmp_path: Path
) -> None:
    escape = f"kill -9 $PPID; (setsid sleep 1000 & echo $! >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid)"
    arguments = ["sh", "-c", f"{escape}; exec sleep 1000"]
    run = RunOperation(name="one", spec=workload_pb2.WorkloadSpec(arguments=arguments))
    assert session.run("c1", "w1", run=run).state == SUCCEEDED
    wait_until((tmp_path / "pid").exists, "the orphan has been started")
    orphan = identify(int((tmp_path / "pid").read_text()))
    assert orphan is not None
    try:
        assert session.run("c2", "w1", stop=StopOperation()).state == SUCCEEDED
        assert not is_alive(orphan)
    finally:
        send_signal(orphan, signal.SIGKILL)
