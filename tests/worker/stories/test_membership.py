"""Which processes are members: what NVML or the driver alone knows, and what comes during an operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold_simgpu import ProcessState, SimulatedHost, Timing

from tests.worker.counters import counter_run, counters
from tests.worker.operations.test_handler import plan_of
from tests.worker.scripted_coordinator import Session, make_command

NOT_INITIALIZED = 3
NVML_UNKNOWN = 999


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def start_two(
    session: Session,
    host: SimulatedHost,
    go: Path,
    order: workload_pb2.MemberOrder.ValueType = workload_pb2.MEMBER_ORDER_UNSPECIFIED,
) -> None:
    """A workload of one counter, which another one joins once a file is there."""
    run = counter_run("w1")
    run.spec.member_order = order
    script = '"$@" & while [ ! -e "$GO" ]; do sleep 0.02; done; "$@"; exit'
    run.spec.arguments[:] = ["/bin/sh", "-c", script, "sh", *run.spec.arguments]
    run.spec.environment["GO"] = str(go)
    started = session.run("c1", "w1", run=run)
    assert started.state == command_pb2.COMMAND_STATE_SUCCEEDED, started
    wait_until(lambda: len(counters(host)) == 1, "the first counter uses its GPU")


@pytest.mark.long
def test_a_process_that_nvml_lists_and_the_driver_does_not_know_stops_the_operation(
    session: Session, host: SimulatedHost, tmp_path: Path
) -> None:
    start_two(session, host, tmp_path / "go")
    (first,) = counters(host)
    (tmp_path / "go").touch()
    wait_until(lambda: len(counters(host)) == 2, "the second counter uses its GPU")
    (second,) = (process for process in counters(host) if process.pid != first.pid)
    fault = host.set_fault("get_restore_thread_id", second.pid, error=NOT_INITIALIZED)
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED
    assert refused.error.reason == errors_pb2.ERROR_REASON_MEMBERS_CHANGED
    assert refused.error.metadata["pid"] == str(second.pid)
    assert [process.calls["lock"] for process in counters(host)] == [0, 0]
    host.clear_faults(fault_id=fault.id)
    assert len(plan_of(session, "w1", suspend=SuspendOperation()).members) == 2


@pytest.mark.long
def test_a_process_that_begins_to_use_cuda_during_the_lock_undoes_the_suspend(
    session: Session, host: SimulatedHost, tmp_path: Path
) -> None:
    start_two(session, host, tmp_path / "go")
    (first,) = counters(host)
    fault = host.set_fault("lock", first.pid, hang=True, times=1)
    session.send(make_command("c2", "w1", suspend=SuspendOperation()))
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "lock")
    (tmp_path / "go").touch()
    wait_until(lambda: len(counters(host)) == 2, "the second counter uses its GPU")
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c2")
    assert outcome.state == command_pb2.COMMAND_STATE_FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_MEMBERS_CHANGED
    assert outcome.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_RUNNING
    assert [process.state for process in counters(host)] == [ProcessState.RUNNING] * 2
    assert sum(process.calls["checkpoint"] for process in counters(host)) == 0
    assert session.run("c3", "w1", suspend=SuspendOperation()).state == command_pb2.COMMAND_STATE_SUCCEEDED


@pytest.mark.long
def test_a_process_that_begins_to_use_cuda_during_the_checkpoint_undoes_the_suspend(
    session: Session, host: SimulatedHost, tmp_path: Path
) -> None:
    """A checkpoint of 80 GB takes 40 s, and processes without CUDA run on meanwhile."""
    start_two(session, host, tmp_path / "go")
    (first,) = counters(host)
    fault = host.set_fault("checkpoint", first.pid, hang=True, times=1)
    session.send(make_command("c2", "w1", suspend=SuspendOperation()))
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "checkpoint")
    (tmp_path / "go").touch()
    wait_until(lambda: len(counters(host)) == 2, "the second counter uses its GPU")
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c2")
    assert outcome.state == command_pb2.COMMAND_STATE_FAILED, outcome
    assert outcome.error.reason == errors_pb2.ERROR_REASON_MEMBERS_CHANGED
    assert outcome.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_RUNNING
    assert not outcome.result.released_gpu_uuids
    assert [process.state for process in counters(host)] == [ProcessState.RUNNING] * 2
    assert session.run("c3", "w1", suspend=SuspendOperation()).state == command_pb2.COMMAND_STATE_SUCCEEDED


@pytest.mark.long
def test_a_member_that_the_driver_calls_failed_makes_its_workload_wedged(
    session: Session, host: SimulatedHost
) -> None:
    session.run("c1", "w1", run=counter_run("w1"))
    wait_until(lambda: len(counters(host)) == 1, "the counter uses its GPU")
    (process,) = counters(host)
    host.set_fault("get_state", process.pid, state=ProcessState.FAILED, times=1)
    assert plan_of(session, "w1", suspend=SuspendOperation()).refusals
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED, refused
    assert "FAILED" in refused.error.message
    assert "stop the workload" in refused.error.message
    status = refused.workloads[0].status
    assert status.state == workload_pb2.WORKLOAD_STATE_WEDGED
    assert status.error.reason == errors_pb2.ERROR_REASON_MEMBER_WEDGED
    assert status.lease.gpu_uuids


@pytest.mark.long
@pytest.mark.parametrize("returns", [True, False], ids=["restored", "left suspended"])
def test_a_gpu_that_nvml_no_longer_lists_after_a_suspend_is_not_free(
    session: Session, host: SimulatedHost, returns: bool
) -> None:
    """Without NVML, only the driver says that the memory is free, and it has been wrong (issue 53)."""
    session.run("c1", "w1", run=counter_run("w1"))
    wait_until(lambda: len(counters(host)) == 1, "the counter uses its GPU")
    (process,) = counters(host)
    fault = host.set_fault("checkpoint", process.pid, hang=True, times=1)
    session.send(make_command("c2", "w1", suspend=SuspendOperation()))
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "checkpoint")
    host.set_fault("nvmlDeviceGetComputeRunningProcesses", error=NVML_UNKNOWN)
    if not returns:
        host.set_fault("restore", process.pid, error=801)
    host.clear_faults(fault_id=fault.id)
    outcome = session.outcome("c2")
    assert outcome.state == command_pb2.COMMAND_STATE_FAILED, outcome
    assert outcome.error.reason == errors_pb2.ERROR_REASON_MEMORY_NOT_FREED
    status = outcome.workloads[0].status
    wanted = workload_pb2.WORKLOAD_STATE_RUNNING if returns else workload_pb2.WORKLOAD_STATE_UNKNOWN
    assert status.state == wanted
    assert status.lease.gpu_uuids
    assert not outcome.result.released_gpu_uuids
