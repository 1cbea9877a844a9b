"""When workloads become ready, and what waits for that."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, eviction_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.hook_pb2 import CommandHook, Hook
from leasehold.v1.operation_pb2 import (
    AdoptOperation,
    RemapOperation,
    RestoreOperation,
    RunOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.v1.workload_pb2 import Workload
from leasehold_simgpu import SimulatedHost

from tests.worker.conftest import COUNTER, Counter, WorkerProcess
from tests.worker.counters import counter_run, until, wait_counting, workload
from tests.worker.hook_contexts import READINESS
from tests.worker.operations.test_handler import move, plan_of
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session

SUCCEEDED, REJECTED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_REJECTED
RUNNING, EXITED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_EXITED
NOT_READY = errors_pb2.ERROR_REASON_NOT_READY
STOP = EvictionPolicy(process_strategy=eviction_pb2.PROCESS_STRATEGY_STOP)
UNTIL_STOP = EvictionPolicy(escalate_to=eviction_pb2.PROCESS_STRATEGY_STOP)

LATE = """
import os, runpy, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A counter that begins to use CUDA once a file is there."""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that counters of :func:`late_run` wait for."""
    return tmp_path / "gate"


def late_run(
    gate: Path, hooks: list[Hook] | None = None, eviction: EvictionPolicy | None = None
) -> RunOperation:
    run = counter_run("one")
    arguments = run.spec.arguments[2:]
    del run.spec.arguments[1:]
    run.spec.arguments.extend(["-c", LATE, str(gate), str(COUNTER), *arguments])
    run.spec.hooks.extend(hooks or [])
    if eviction is not None:
        run.spec.eviction.CopyFrom(eviction)
    return run


def probe(path: Path) -> Hook:
    """A readiness probe: a file is there."""
    return Hook(name="file-there", phase=READINESS, command=CommandHook(arguments=["test", "-e", str(path)]))


def until_ready(session: Session, workload_id: str = "w1") -> Workload:
    if any(w.workload_id == workload_id and w.status.HasField("ready_time") for w in session.hello.workloads):
        return workload(session, workload_id)
    event = session.wait(
        lambda frame: (
            frame.workload_event.workload.workload_id == workload_id
            and frame.workload_event.workload.status.HasField("ready_time")
        )
    )
    return event.workload_event.workload


@pytest.mark.long
def test_a_workload_is_ready_once_it_uses_cuda(session: Session, gate: Path, host: SimulatedHost) -> None:
    started = session.run("c1", "w1", run=late_run(gate)).workloads[0]
    assert started.status.state == RUNNING
    assert not started.status.HasField("ready_time")
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert (refused.state, refused.error.reason) == (REJECTED, NOT_READY)
    assert "no process of it uses CUDA yet" in refused.error.message
    assert "leasehold wait one" in refused.error.message
    assert refused.error.metadata["workload_id"] == "w1"
    (refusal,) = plan_of(session, "w1", suspend=SuspendOperation()).refusals
    assert refusal.reason == NOT_READY
    moves = [move("w1", host.gpus[0].uuid, host.gpus[1].uuid)]
    assert session.run("c3", "w1", remap=RemapOperation(moves=moves)).error.reason == NOT_READY
    gate.touch()
    ready = until_ready(session)
    assert ready.status.generation > started.status.generation
    assert ready.status.ready_time.ToNanoseconds() > ready.status.start_time.ToNanoseconds()
    suspended = session.run("c4", "w1", suspend=SuspendOperation())
    assert suspended.state == SUCCEEDED, suspended
    assert suspended.workloads[0].status.ready_time == ready.status.ready_time
    assert (
        session.run("c5", "w1", restore=RestoreOperation()).workloads[0].status.ready_time
        == ready.status.ready_time
    )


@pytest.mark.long
def test_a_workload_that_is_not_ready_is_not_stopped_by_its_ladder(session: Session, gate: Path) -> None:
    session.run("c1", "w1", run=late_run(gate, eviction=UNTIL_STOP))
    assert session.run("c2", "w1", suspend=SuspendOperation()).error.reason == NOT_READY
    yielding = session.run("c3", "w1", suspend=SuspendOperation(gives_way=True))
    assert yielding.state == SUCCEEDED, "a helper must not keep its GPU from others"
    assert yielding.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_STOPPED


def test_a_workload_that_is_not_ready_can_be_stopped(session: Session, gate: Path) -> None:
    session.run("c1", "w1", run=late_run(gate))
    assert session.run("c2", "w1", stop=StopOperation()).state == SUCCEEDED
    ended = until(session, "w1", EXITED)
    assert not ended.status.HasField("ready_time")
    refused = session.run("c3", "w1", suspend=SuspendOperation())
    assert refused.error.reason == errors_pb2.ERROR_REASON_WRONG_STATE


def test_a_program_that_ends_before_it_is_ready(session: Session) -> None:
    run = counter_run("one")
    run.spec.arguments[:] = [sys.executable, "-c", "raise SystemExit(3)"]
    session.run("c1", "w1", run=run)
    ended = until(session, "w1", EXITED)
    assert ended.status.exit.code == 3
    assert not ended.status.HasField("ready_time")


@pytest.mark.long
def test_a_workload_without_gpus_is_ready_at_its_start(session: Session) -> None:
    run = RunOperation(name="one", spec=workload_pb2.WorkloadSpec(arguments=["sleep", "60"]))
    assert session.run("c1", "w1", run=run).state == SUCCEEDED
    until_ready(session)
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert refused.error.reason == errors_pb2.ERROR_REASON_NOT_A_CUDA_PROCESS


@pytest.mark.long
def test_an_adopted_workload_is_ready(session: Session, start_counter: Callable[..., Counter]) -> None:
    counter = start_counter(1)
    deadline = time.monotonic() + 30
    while not counter.counts():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    adopted = session.run("c1", "w1", adopt=AdoptOperation(name="one", pid=counter.process.pid))
    assert adopted.workloads[0].status.HasField("ready_time")


@pytest.mark.long
def test_a_workload_with_a_probe_is_ready_once_that_succeeds(session: Session, tmp_path: Path) -> None:
    there = tmp_path / "there"
    run = counter_run("one")
    run.spec.hooks.append(probe(there))
    session.run("c1", "w1", run=run)
    wait_counting(session, "w1")
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert (refused.state, refused.error.reason) == (REJECTED, NOT_READY)
    assert "readiness probe" in refused.error.message
    plan = plan_of(session, "w1", suspend=SuspendOperation(force=True))
    assert not plan.refusals, "whoever forces it does not wait for a probe that may be wrong"
    there.touch()
    until_ready(session)
    parked = session.run("c3", "w1", suspend=SuspendOperation())
    assert parked.state == SUCCEEDED, parked
    assert "hooks" not in [phase.phase for phase in parked.result.phases]
    assert session.run("c4", "w1", restore=RestoreOperation()).state == SUCCEEDED


@pytest.mark.long
def test_why_a_probe_fails_is_told(session: Session, tmp_path: Path) -> None:
    run = counter_run("one")
    arguments = ["sh", "-c", "echo weights are being loaded; exit 1"]
    run.spec.hooks.append(Hook(name="server", phase=READINESS, command=CommandHook(arguments=arguments)))
    session.run("c1", "w1", run=run)
    deadline = time.monotonic() + 30
    while (
        "weights are being loaded"
        not in plan_of(session, "w1", suspend=SuspendOperation()).refusals[0].message
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_a_program_that_is_started_again_is_ready_anew(session: Session, gate: Path) -> None:
    gate.touch()
    session.run("c1", "w1", run=late_run(gate))
    first = until_ready(session).status.ready_time
    stopped = session.run("c2", "w1", suspend=SuspendOperation(policy=STOP, force=True))
    assert stopped.state == SUCCEEDED, stopped
    gate.unlink()
    again = session.run("c3", "w1", restore=RestoreOperation()).workloads[0]
    assert again.status.state == RUNNING
    assert not again.status.HasField("ready_time")
    gate.touch()
    session.wait(
        lambda f: f.workload_event.workload.status.ready_time.ToNanoseconds() > first.ToNanoseconds()
    )


@pytest.mark.long
def test_readiness_outlives_the_worker(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    gate: Path,
    tmp_path: Path,
) -> None:
    worker = start_worker(host)
    session = coordinator.next_session()
    there = tmp_path / "there"
    there.touch()
    probed = counter_run("two")
    probed.spec.hooks.append(probe(there))
    session.run("c1", "w1", run=late_run(gate))
    session.run("c2", "w2", run=probed)
    ready = until_ready(session, "w2")
    worker.kill()
    there.unlink()
    start_worker(host)
    again = coordinator.next_session()
    assert workload(again, "w2").status.ready_time == ready.status.ready_time, "readiness is kept"
    assert not workload(again, "w1").status.HasField("ready_time")
    assert again.run("c3", "w1", suspend=SuspendOperation()).error.reason == NOT_READY
    gate.touch()
    until_ready(again, "w1")
    assert again.run("c4", "w1", suspend=SuspendOperation()).state == SUCCEEDED
