"""The worker as a process on simulated GPUs, driven over its stream by a scripted coordinator."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, gpu_pb2, lease_pb2, workload_pb2
from leasehold.v1.operation_pb2 import (
    Move,
    RemapOperation,
    RestoreOperation,
    RunOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import WorkerLoad
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.errors import StartError
from leasehold_worker.files.state_directory import open_state_directory
from leasehold_worker.host.processes import identify

from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, counts, headless_run, read_output, wait_counting
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, is_goodbye, make_command

SUCCEEDED, FAILED, REJECTED = (
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_REJECTED,
)
FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


def pool_states(session: Session, wanted: list[int]) -> WorkerLoad:
    """The first load that shows these slot states."""
    return session.wait(
        lambda frame: (
            frame.HasField("worker_load")
            and [lease.state for lease in frame.worker_load.gpu_leases] == wanted
        )
    ).worker_load


def test_hello_tells_everything(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
) -> None:
    settings = tmp_path / "worker.toml"
    settings.write_text('criu = "/nonexistent/criu"\n')
    start_worker(host, config=str(settings))
    hello = coordinator.next_session().hello
    assert hello.name == "alpha"
    assert [gpu.uuid for gpu in hello.gpus] == [gpu.uuid for gpu in host.gpus]
    assert [gpu.slot for gpu in hello.gpus] == [0, 1, 2, 3]
    assert all(gpu.memory_total_bytes == host.gpus[0].memory_bytes for gpu in hello.gpus)
    assert [lease.state for lease in hello.gpu_leases] == [FREE] * 4
    assert all(lease.sample.HasField("memory_used_bytes") for lease in hello.gpu_leases)
    assert {c.name: c.available for c in hello.capabilities} == {
        "cuda_suspend": True,
        "gpu_remap": True,
        "checkpoint_image": False,
        "application_checkpoint": True,
        "cpu_limit": False,
        "memory_limit": False,
        "health_events": True,
        "commands": True,
    }
    (why,) = (c.reason for c in hello.capabilities if c.name == "checkpoint_image")
    assert why.startswith("/nonexistent/criu is missing")
    assert hello.driver_version == host.driver_version
    assert hello.cuda_version == 13000
    assert hello.last_epoch == 0


@pytest.mark.usefixtures("executed")
def test_the_whole_life_of_a_workload(session: Session, host: SimulatedHost) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]
    started = session.run("c1", "w1", run=counter_run("one"))
    assert started.state == SUCCEEDED, started
    assert list(started.result.claimed_gpu_uuids) == [uuids[0]]
    pool_states(session, [LEASED, FREE, FREE, FREE])
    wait_counting(session, "w1", uuids[0])

    suspended = session.run("c2", "w1", suspend=SuspendOperation())
    assert suspended.state == SUCCEEDED, suspended
    assert list(suspended.result.released_gpu_uuids) == [uuids[0]]
    assert [phase.phase for phase in suspended.result.members[0].phases] == ["lock", "checkpoint"]
    status = suspended.workloads[0].status
    assert status.state == workload_pb2.WORKLOAD_STATE_SUSPENDED
    assert status.parked_bytes > 2**20
    assert list(status.parked_gpu_uuids) == [uuids[0]]
    load = pool_states(session, [FREE] * 4)
    assert load.pending_claimers == 0
    assert session.run("c3", "w1", suspend=SuspendOperation()).result.already_there

    other = session.run("c4", "w2", run=counter_run("two"))
    assert list(other.result.claimed_gpu_uuids) == [uuids[0]]
    restored = session.run("c5", "w1", restore=RestoreOperation())
    assert restored.state == SUCCEEDED, restored
    assert list(restored.result.claimed_gpu_uuids) == [uuids[1]]
    assert {(p.old_uuid, p.new_uuid) for p in restored.result.applied_pairs} == {
        (uuids[0], uuids[1]),
        (uuids[1], uuids[0]),
        (uuids[2], uuids[2]),
        (uuids[3], uuids[3]),
    }
    wait_counting(session, "w1", uuids[1])

    pair = gpu_pb2.GpuPair(old_uuid=uuids[1], new_uuid=uuids[3].removeprefix("GPU-"))
    remapped = session.run("c6", "w1", remap=RemapOperation(moves=[Move(workload_id="w1", pairs=[pair])]))
    assert remapped.state == SUCCEEDED, remapped
    (member,) = remapped.workloads[0].status.members
    assert list(member.device_memory_bytes) == [uuids[3]], "measured where it is now"
    pool_states(session, [LEASED, FREE, FREE, LEASED])
    text = wait_counting(session, "w1", uuids[3])
    assert counts(text) == list(range(counts(text)[0], counts(text)[-1] + 1)), "no count is lost"

    stopped = session.run("c7", "w1", stop=StopOperation())
    assert stopped.state == SUCCEEDED
    assert stopped.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_EXITED
    pool_states(session, [LEASED, FREE, FREE, FREE])
    assert session.run("c8", "w1", stop=StopOperation()).result.already_there


@pytest.mark.long
def test_a_workload_tells_since_when_it_is_parked(session: Session) -> None:
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    before = time.time()
    suspended = session.run("c2", "w1", suspend=SuspendOperation()).workloads[0].status
    assert before - 1 <= suspended.park_time.ToNanoseconds() / 1e9 <= time.time()
    again = session.run("c3", "w1", suspend=SuspendOperation()).workloads[0].status
    assert again.park_time == suspended.park_time
    restored = session.run("c4", "w1", restore=RestoreOperation()).workloads[0].status
    assert not restored.HasField("park_time")


def test_a_command_that_comes_twice_is_done_once(session: Session) -> None:
    session.run("c1", "w1", run=counter_run("one"))
    seen = len(session.frames)
    session.send(make_command("c1", "w1", run=counter_run("one")))
    session.send(make_command("c2", "w2", run=counter_run("two")))
    session.outcome("c2")
    again = [f.command_update for f in session.frames[seen:] if f.command_update.command_id == "c1"]
    assert [update.state for update in again] == [SUCCEEDED]
    assert len(pool_states(session, [LEASED, LEASED, FREE, FREE]).gpu_leases) == 4


@pytest.mark.long
def test_outcomes_are_told_again_until_they_are_acknowledged(
    session: Session, coordinator: ScriptedCoordinator
) -> None:
    session.run("c1", "w1", run=counter_run("one"))
    session.run("c2", "w2", run=counter_run("two"))
    session.acknowledge("c1")
    session.end()
    following = coordinator.next_session()
    assert list(following.hello.commands_unacknowledged) == ["c2"]
    assert following.hello.last_epoch == session.epoch
    assert following.outcome("c2").state == SUCCEEDED
    assert {workload.name for workload in following.hello.workloads} == {"one", "two"}
    assert [lease.state for lease in following.hello.gpu_leases] == [LEASED, LEASED, FREE, FREE]


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        ({"run": counter_run("many", 5)}, errors_pb2.ERROR_REASON_NO_FREE_GPU),
        pytest.param(
            {"run": RunOperation(name="empty")},
            errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
            marks=pytest.mark.long,
        ),
        ({"run": counter_run("x", gpu_uuids=["GPU-1"])}, errors_pb2.ERROR_REASON_INVALID_ARGUMENT),
        pytest.param(
            {"suspend": SuspendOperation()}, errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD, marks=pytest.mark.long
        ),
        ({"restore": RestoreOperation()}, errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD),
        pytest.param(
            {"stop": StopOperation()}, errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD, marks=pytest.mark.long
        ),
        ({"remap": RemapOperation()}, errors_pb2.ERROR_REASON_INVALID_ARGUMENT),
        pytest.param({}, errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY, marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(
    session: Session, operation: dict[str, object], reason: int
) -> None:
    refused = session.run("c1", "w1", **operation)
    assert refused.state == REJECTED
    assert refused.error.reason == reason
    assert refused.error.message


@pytest.mark.long
def test_wrong_gpus_are_refused_and_nothing_is_changed(session: Session, host: SimulatedHost) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]
    session.run("c1", "w1", run=counter_run("one"))
    session.run("c2", "w2", run=counter_run("two"))
    wait_counting(session, "w1")

    def remap(command_id: str, *pairs: tuple[str, str]) -> int:
        messages = [gpu_pb2.GpuPair(old_uuid=old, new_uuid=new) for old, new in pairs]
        operation = RemapOperation(moves=[Move(workload_id="w1", pairs=messages)])
        update = session.run(command_id, "w1", remap=operation)
        assert update.state == REJECTED
        return update.error.reason

    nowhere = "GPU-00000000-0000-0000-0000-000000000000"
    assert remap("c3", (uuids[0], uuids[1])) == errors_pb2.ERROR_REASON_NO_FREE_GPU
    assert remap("c4", (uuids[0], nowhere)) == errors_pb2.ERROR_REASON_UNKNOWN_GPU
    assert remap("c5", (uuids[2], uuids[3])) == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    pairs = ((uuids[0], uuids[2]), (uuids[0], uuids[3]))
    assert remap("c6", *pairs) == errors_pb2.ERROR_REASON_DUPLICATE_GPU
    assert session.run("c7", "w1", restore=RestoreOperation()).result.already_there
    wait_counting(session, "w1", uuids[0])


@pytest.mark.long
def test_a_remap_whose_restore_fails_goes_back(session: Session, host: SimulatedHost) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]
    started = session.run("c1", "w1", run=counter_run("one"))
    text = wait_counting(session, "w1")
    host.set_fault("restore", started.workloads[0].status.root_pid, error=801, times=1)
    pair = gpu_pb2.GpuPair(old_uuid=uuids[0], new_uuid=uuids[1])
    failed = session.run("c2", "w1", remap=RemapOperation(moves=[Move(workload_id="w1", pairs=[pair])]))
    assert failed.state == FAILED
    assert failed.error.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_STATE
    assert failed.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_RUNNING
    text = wait_counting(session, "w1", uuids[0])
    assert counts(text) == list(range(counts(text)[0], counts(text)[-1] + 1))
    pool_states(session, [LEASED, FREE, FREE, FREE])


@pytest.mark.long
def test_a_remap_that_the_driver_ignores_is_found_out(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
) -> None:
    config = tmp_path / "worker.toml"
    config.write_text("proof_timeout_s = 1\n")
    start_worker(host, config=str(config))
    session = coordinator.next_session()
    uuids = [gpu.uuid for gpu in host.gpus]
    started = session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    root_pid = started.workloads[0].status.root_pid
    host.set_fault("restore", root_pid, ignore_gpu_pairs=True, times=1)
    pair = gpu_pb2.GpuPair(old_uuid=uuids[0], new_uuid=uuids[1])
    failed = session.run("c2", "w1", remap=RemapOperation(moves=[Move(workload_id="w1", pairs=[pair])]))
    assert failed.state == FAILED
    assert failed.error.reason == errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED
    assert failed.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_RUNNING
    wait_counting(session, "w1", uuids[0])


@pytest.mark.long
def test_restore_waits_for_nobody_and_refuses_without_room(session: Session, host: SimulatedHost) -> None:
    session.run("c1", "w1", run=counter_run("one", 2))
    wait_counting(session, "w1")
    session.run("c2", "w1", suspend=SuspendOperation())
    session.run("c3", "w2", run=counter_run("two", 4))
    refused = session.run("c4", "w1", restore=RestoreOperation())
    assert refused.state == REJECTED
    assert refused.error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    session.run("c5", "w2", stop=StopOperation())
    host.hog(0, host.gpus[0].memory_bytes)
    elsewhere = session.run("c6", "w1", restore=RestoreOperation())
    assert elsewhere.state == SUCCEEDED, "a GPU without memory is passed over"
    assert host.gpus[0].uuid not in elsewhere.result.claimed_gpu_uuids


def test_a_workload_that_ends_gives_its_gpu_back(session: Session) -> None:
    spec = workload_pb2.WorkloadSpec(
        arguments=["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $LEASEHOLD_WORKLOAD; sleep 300 & exit 3"],
        resources=workload_pb2.Resources(gpu_count=1),
    )
    session.run("c1", "w1", run=RunOperation(name="short", spec=spec))
    event = session.wait(
        lambda f: f.workload_event.kind == session_pb2.WORKLOAD_EVENT_KIND_EXITED
    ).workload_event
    assert event.workload.status.exit.code == 3
    assert not event.workload.status.HasField("lease")
    assert read_output(session, "w1") == f"{session.hello.gpus[0].uuid} short\n"


def test_a_program_that_is_not_there_is_refused_and_the_gpu_free(session: Session) -> None:
    spec = workload_pb2.WorkloadSpec(
        arguments=["/no/such/program"], resources=workload_pb2.Resources(gpu_count=1)
    )
    failed = session.run("c1", "w1", run=RunOperation(name="x", spec=spec))
    assert failed.error.reason == errors_pb2.ERROR_REASON_SPAWN_FAILED
    assert failed.error.message.startswith(
        "'/no/such/program' could not be started: No such file or directory; give the path of a program "
    )
    taken = session.run("c2", "w2", run=counter_run("all", 4))
    assert taken.state == SUCCEEDED


def test_a_workload_that_ignores_sigterm_is_killed_after_the_grace(session: Session) -> None:
    spec = workload_pb2.WorkloadSpec(
        arguments=["sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"]
    )
    session.run("c1", "w1", run=RunOperation(name="stubborn", spec=spec))
    while read_output(session, "w1") != "up\n":
        time.sleep(0.01)
    grace = duration_pb2.Duration(nanos=50_000_000)
    stopped = session.run("c2", "w1", stop=StopOperation(grace=grace))
    assert stopped.workloads[0].status.exit.signal_number == signal.SIGKILL


@pytest.mark.long
def test_a_workload_whose_first_thread_has_ended_lives(session: Session, host: SimulatedHost) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]
    assert session.run("c1", "w1", run=headless_run("one")).state == SUCCEEDED
    wait_counting(session, "w1", uuids[0])
    assert session.run("c2", "w1", suspend=SuspendOperation()).state == SUCCEEDED
    assert session.run("c3", "w1", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "w1", uuids[0])
    (pid,) = (process.pid for process in host.processes() if any(process.gpu_bytes.values()))
    stop = StopOperation(grace=duration_pb2.Duration(nanos=50_000_000))
    assert session.run("c4", "w1", stop=stop).state == SUCCEEDED
    assert identify(pid) is None
    pool_states(session, [FREE] * 4)


FORKING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
count = os.open("forks", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
if os.fork() and sys.argv[1] == "stays":
    print("up", flush=True)
    time.sleep(1000)
for number in range(50_000):
    if os.fork():
        while not (number or os.fstat(count).st_size):
            time.sleep(0.001)  # the first process leaves a chain that has begun
        break
    os.write(count, b".")
    if sys.argv[2] == "own":
        os.setsid()
"""
"""Forks, forks and forks: one process lives at any moment, for less than a millisecond. It ends one day."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("root", "sessions"),
    [
        pytest.param("leaves", "own", marks=pytest.mark.long),
        ("stays", "same"),
        pytest.param("leaves", "same", marks=pytest.mark.long),
        pytest.param("stays", "own", marks=pytest.mark.long),
    ],
)
def test_nothing_of_a_chain_of_forks_is_left(
    session: Session, tmp_path: Path, root: str, sessions: str
) -> None:
    arguments = [sys.executable, "-c", FORKING, root, sessions]
    spec = workload_pb2.WorkloadSpec(arguments=arguments, resources=workload_pb2.Resources(gpu_count=1))
    assert session.run("c1", "w1", run=RunOperation(name="forking", spec=spec)).state == SUCCEEDED
    forks = tmp_path / "state/workloads/w1/work/forks"
    if root == "stays":
        while not forks.exists() or forks.stat().st_size < 100:
            time.sleep(0.01)
        stop = StopOperation(grace=duration_pb2.Duration(nanos=50_000_000))
        assert session.run("c2", "w1", stop=stop).state == SUCCEEDED
    session.wait(
        lambda frame: (
            frame.workload_event.workload.status.state == workload_pb2.WORKLOAD_STATE_EXITED
            and frame.HasField("workload_event")
        )
    )
    left = forks.stat().st_size
    assert left
    time.sleep(0.3)
    assert forks.stat().st_size == left, "it forks on"


@pytest.mark.long
def test_a_command_of_an_older_epoch_is_not_obeyed(session: Session) -> None:
    session.send(make_command("c1", "w1", run=counter_run("one")), epoch=session.epoch - 1)
    refused = session.outcome("c1")
    assert refused.state == REJECTED
    assert refused.error.reason == errors_pb2.ERROR_REASON_STALE_EPOCH


def test_a_command_for_a_workload_that_has_changed_is_not_obeyed(session: Session) -> None:
    session.run("c1", "w1", run=counter_run("one"))
    command = make_command("c2", "w1", stop=StopOperation())
    command.expected_generation = 7
    session.send(command)
    assert session.outcome("c2").error.reason == errors_pb2.ERROR_REASON_GENERATION_MISMATCH
    command.command_id, command.expected_generation = "c3", 1
    session.send(command)
    assert session.outcome("c3").state == SUCCEEDED


@pytest.mark.long
def test_the_worker_says_goodbye_and_takes_its_workloads_with_it(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    session.run("c1", "w1", run=counter_run("one"))
    session.run("c2", "w2", run=counter_run("two"))
    wait_counting(session, "w2")
    session.run("c3", "w2", suspend=SuspendOperation())
    assert worker.stop() == 0
    session.wait(is_goodbye(session_pb2.GOODBYE_REASON_SHUTDOWN))
    assert host.processes() == ()


@pytest.mark.long
def test_the_id_is_kept_and_the_epoch_grows(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host)
    first = coordinator.next_session()
    worker.stop()
    start_worker(host)
    second = coordinator.next_session()
    assert second.hello.worker_id == first.hello.worker_id
    assert second.hello.instance_id != first.hello.instance_id
    assert second.hello.last_epoch == first.epoch


def test_a_host_without_gpus_serves_cpu_workloads(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    assert not session.hello.gpus
    available = {c.name for c in session.hello.capabilities if c.available}
    assert available - {"checkpoint_image"} == {"application_checkpoint", "commands"}
    spec = workload_pb2.WorkloadSpec(arguments=["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"])
    assert session.run("c1", "w1", run=RunOperation(name="cpu", spec=spec)).state == SUCCEEDED
    session.wait(lambda f: f.workload_event.kind == session_pb2.WORKLOAD_EVENT_KIND_EXITED)
    assert read_output(session, "w1") == "-1\n"


@pytest.mark.long
def test_a_lost_gpu_is_reported_and_never_kills_the_worker(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    host.lose_gpu(1)
    start_worker(host)
    session = coordinator.next_session()
    uuids = [gpu.uuid for gpu in session.hello.gpus]
    assert host.gpus[0].uuid in uuids
    host.lose_gpu(0)
    session.run("c1", "w1", run=counter_run("one", gpu_uuids=[host.gpus[2].uuid]))
    frame = session.wait(
        lambda f: any(lease.health == gpu_pb2.GPU_HEALTH_LOST for lease in f.worker_load.gpu_leases)
    )
    lost = [lease.gpu_uuid for lease in frame.worker_load.gpu_leases if not lease.HasField("sample")]
    assert host.gpus[0].uuid in lost
    wait_counting(session, "w1", host.gpus[2].uuid)


@pytest.mark.long
def test_an_old_driver_is_refused_with_what_it_lacks(
    start_worker: Callable[..., WorkerProcess], tmp_path: Path, coordinator: ScriptedCoordinator
) -> None:
    host = SimulatedHost.create(
        tmp_path / "old", gpus=2, chip="H100", cuda_version=12080, timing=Timing.instant()
    )
    start_worker(host)
    session = coordinator.next_session()
    uuids = [gpu.uuid for gpu in host.gpus]
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1")
    pair = gpu_pb2.GpuPair(old_uuid=uuids[0], new_uuid=uuids[1])
    refused = session.run("c2", "w1", remap=RemapOperation(moves=[Move(workload_id="w1", pairs=[pair])]))
    assert refused.error.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER
    assert "13.0" in refused.error.message
    assert session.run("c3", "w1", suspend=SuspendOperation()).state == SUCCEEDED
    assert session.run("c4", "w1", restore=RestoreOperation()).state == SUCCEEDED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "nowhere"}, "is not HOST:PORT"),
        ({"config": "/no/such/file.toml"}, "can't be read: No such file"),
        ({"state-dir": "/proc/nothing"}, "can't be written"),
    ],
)
def test_bad_options_are_one_line(
    start_worker: Callable[..., WorkerProcess], options: dict[str, str], message: str
) -> None:
    worker = start_worker(None, **options)
    assert worker.process.wait(timeout=30) == 2
    text = worker.log.read_text()
    assert message in text
    assert len(text.splitlines()) == 1


def test_a_state_directory_belongs_to_one_worker(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator
) -> None:
    start_worker(None)
    coordinator.next_session()
    second = start_worker(None)
    assert second.process.wait(timeout=30) == 2
    assert "another worker uses the state directory" in second.log.read_text()


def test_starts_are_counted(tmp_path: Path) -> None:
    with open_state_directory(tmp_path / "state") as directory:
        assert [directory.count_start(), directory.count_start()] == [1, 2]
    with open_state_directory(tmp_path / "state") as directory:
        assert directory.count_start() == 3
        (tmp_path / "state/starts").write_text("none\n")
        with pytest.raises(StartError, match="starts is damaged, it holds no number"):
            directory.count_start()


@pytest.mark.long
def test_a_gpu_belongs_to_one_worker(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, host: SimulatedHost
) -> None:
    first = start_worker(host)
    coordinator.next_session()
    second = start_worker(host, state="state-of-another")
    assert second.process.wait(timeout=30) == 2
    said = second.log.read_text()
    assert "is served by another worker of this host" in said
    assert f"process {first.process.pid} of user" in said
    first.kill()
    start_worker(host, state="state-of-another")
    assert len(coordinator.next_session().hello.gpus) == len(host.gpus)


@pytest.mark.long
def test_workers_divide_the_gpus_of_a_host(
    start_worker: Callable[..., WorkerProcess],
    coordinator: ScriptedCoordinator,
    host: SimulatedHost,
    tmp_path: Path,
) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]

    def serve(name: str, served: list[str]) -> Session:
        settings = tmp_path / f"{name}.toml"
        settings.write_text(f"gpus = {json.dumps(served)}")
        start_worker(host, state=f"state-{name}", config=str(settings))
        return coordinator.next_session()

    host.set_readings(0, ecc_uncorrected=1)  # a GPU of the other worker: none of this one's business
    session = serve("left", [uuids[3], uuids[1].upper().removeprefix("GPU-")])
    assert [gpu.uuid for gpu in session.hello.gpus] == [uuids[1], uuids[3]]
    other = serve("right", [uuids[0]])
    assert [gpu.uuid for gpu in other.hello.gpus] == [uuids[0]]
    # The driver's map of GPUs names those of the other worker too.
    assert session.run("c-1", "w-1", run=counter_run("one")).state == SUCCEEDED
    wait_counting(session, "w-1", uuids[1])
    pair = gpu_pb2.GpuPair(old_uuid=uuids[1], new_uuid=uuids[3])
    move = Move(workload_id="w-1", pairs=[pair])
    session.send(make_command("c-2", "w-1", remap=RemapOperation(moves=[move])))
    assert session.outcome("c-2").state == SUCCEEDED
    pool_states(session, [FREE, LEASED])
    foreign = gpu_pb2.GpuPair(old_uuid=uuids[3], new_uuid=uuids[0])
    move = Move(workload_id="w-1", pairs=[foreign])
    session.send(make_command("c-3", "w-1", remap=RemapOperation(moves=[move])))
    assert session.outcome("c-3").error.reason == errors_pb2.ERROR_REASON_UNKNOWN_GPU


def test_gpus_that_the_host_lacks_are_told(
    start_worker: Callable[..., WorkerProcess],
    coordinator: ScriptedCoordinator,
    host: SimulatedHost,
    tmp_path: Path,
) -> None:
    lost, settings = "GPU-00000000-0000-0000-0000-000000000000", tmp_path / "worker.toml"
    settings.write_text(f"gpus = {json.dumps([lost])}")
    refused = start_worker(host, config=str(settings))
    assert refused.process.wait(timeout=30) == 2
    assert "the setting gpus names no GPU of this host" in refused.log.read_text()
    settings.write_text(f"gpus = {json.dumps([lost, host.gpus[2].uuid])}")
    worker = start_worker(host, config=str(settings))
    assert [gpu.uuid for gpu in coordinator.next_session().hello.gpus] == [host.gpus[2].uuid]
    assert f"this host lacks {lost}" in worker.log.read_text()
    assert "with 1 GPU\n" in worker.log.read_text()
