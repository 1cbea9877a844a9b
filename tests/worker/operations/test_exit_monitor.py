"""The end of the first process of an adopted tree, while others of the tree are suspended."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from leasehold.v1 import command_pb2, errors_pb2, lease_pb2, workload_pb2
from leasehold.v1.operation_pb2 import AdoptOperation, SuspendOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_simgpu import ProcessState, SimulatedHost, Timing
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.host.processes import identify
from leasehold_worker.operations.kill import Killer
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import RUNNING, SUSPENDED, SUSPENDING
from leasehold_worker.workloads.workload import CLAIM, Workload

from tests.worker.conftest import COUNTER
from tests.worker.counters import counter_run, counters, until
from tests.worker.scripted_coordinator import Session, make_command
from tests.worker.stories.test_membership import wait_until

EXITED = workload_pb2.WORKLOAD_STATE_EXITED
COUNTING = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]
LAUNCHER = 'CUDA_VISIBLE_DEVICES=$FIRST "$@" & CUDA_VISIBLE_DEVICES=$SECOND "$@" & wait'


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())


@pytest.fixture
def launcher(host: SimulatedHost) -> Iterator[subprocess.Popen[bytes]]:
    """A program that uses no GPU, and two counters that it starts, each on a GPU of its own."""
    gpus = {"FIRST": host.gpus[0].uuid, "SECOND": host.gpus[1].uuid}
    command = ["sh", "-c", LAUNCHER, "sh", *COUNTING]
    process = subprocess.Popen(command, env={**os.environ, **host.environment(), **gpus})
    wait_until(lambda: len(counters(host)) == 2, "both counters use their GPUs")
    yield process
    process.kill()
    process.wait(timeout=30)
    for counter in counters(host):
        os.kill(counter.pid, signal.SIGKILL)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def adopt(session: Session, launcher: subprocess.Popen[bytes]) -> None:
    adopted = session.run("adopt", "w1", adopt=AdoptOperation(name="tree", pid=launcher.pid))
    assert adopted.state == command_pb2.COMMAND_STATE_SUCCEEDED, adopted.error


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=30)


def wait_slots(session: Session, *states: lease_pb2.SlotState.ValueType) -> None:
    session.wait(
        lambda frame: tuple(lease.state for lease in frame.worker_load.gpu_leases) == states,
    )


def test_the_end_of_the_first_process_ends_suspended_ones(
    session: Session, host: SimulatedHost, launcher: subprocess.Popen[bytes]
) -> None:
    """Nobody could restore them after the end of the workload."""
    adopt(session, launcher)
    suspended = session.run("suspend", "w1", suspend=SuspendOperation())
    assert suspended.state == command_pb2.COMMAND_STATE_SUCCEEDED, suspended.error
    assert [process.state for process in host.processes()].count(ProcessState.CHECKPOINTED) == 2
    end(launcher)
    until(session, "w1", EXITED)
    wait_until(
        lambda: all(process.state != ProcessState.CHECKPOINTED for process in host.processes()),
        "the suspended processes have ended",
    )


async def test_members_that_are_suspended_during_the_last_search_for_processes_are_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    """The search can take seconds, and the session of the first process may have members for a suspend."""
    kill = Killer.kill_suspended
    kills: list[int] = []

    async def counted(killer: Killer, workload: Workload) -> None:
        kills.append(workload.state)
        await kill(killer, workload)

    monkeypatch.setattr(Killer, "kill_suspended", counted)
    async with open_parts(WorkerConfig(), tmp_path / "workloads", lambda _: None) as parts:
        identity = identify(sleeper.pid)
        assert identity is not None
        spec, now = WorkloadSpec(), datetime.now(UTC)
        workload = Workload("w", "w", spec, identity, tmp_path, now, None, origin=CLAIM)
        look, states = parts.foreign.look, iter([SUSPENDING, SUSPENDED])

        async def look_while_suspending(workloads: Workloads, leaving: Workload | None = None) -> None:
            for state in states:
                workloads.set_state(workload, state)
            await look(workloads, leaving)

        monkeypatch.setattr(parts.foreign, "look", look_while_suspending)
        parts.exit_monitor.add(workload)
        sleeper.kill()
        with trio.fail_after(30):
            await workload.ended.wait()
    assert kills == [RUNNING, SUSPENDED]


@pytest.mark.long
def test_a_workload_keeps_its_lease_until_its_suspend_is_rolled_back(
    session: Session,
    host: SimulatedHost,
    launcher: subprocess.Popen[bytes],
    start_counter: Callable[..., object],
) -> None:
    """A member that is checkpointed already returns to its GPU, which nobody else may have got meanwhile."""
    adopt(session, launcher)
    first, second = sorted(counters(host), key=lambda process: host.gpus[0].uuid not in process.gpu_bytes)
    host.set_fault("checkpoint", second.pid, delay_s=3, error=801, times=1)
    session.send(make_command("suspend", "w1", suspend=SuspendOperation()))
    wait_until(
        lambda: (now := host.process(first.pid)) is not None and now.state == ProcessState.CHECKPOINTED,
        "the first counter is checkpointed",
    )
    end(launcher)
    run = counter_run("other")
    run.gpu_uuids.append(host.gpus[0].uuid)
    refused = session.run("run", "w2", run=run)
    assert refused.error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU, refused
    assert session.outcome("suspend").state == command_pb2.COMMAND_STATE_FAILED
    until(session, "w1", EXITED)
    assert [process.state for process in counters(host)] == [ProcessState.RUNNING] * 2
    wait_slots(session, lease_pb2.SLOT_STATE_FOREIGN, lease_pb2.SLOT_STATE_FOREIGN)
