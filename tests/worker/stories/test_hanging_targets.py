"""Calls that hang because of what their target has: they end at their deadline, and nobody stays locked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold_simgpu import ProcessState, SimulatedHost, Timing

from tests.worker.counters import counters, wait_counting
from tests.worker.operations.test_handler import start
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session
from tests.worker.stories.test_membership import start_two, wait_until


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


@pytest.fixture
def session(
    host: SimulatedHost,
    tmp_path: Path,
    start_worker: Callable[..., object],
    coordinator: ScriptedCoordinator,
) -> Session:
    """The session of a worker that gives a call up after three seconds."""
    config = tmp_path / "worker.toml"
    config.write_text("driver_call_floor_s = 3")
    start_worker(host, config=str(config))
    return coordinator.next_session()


@pytest.mark.long
def test_ranks_that_hold_up_each_others_calls_run_on(
    session: Session, host: SimulatedHost, tmp_path: Path
) -> None:
    """NVIDIA/cuda-checkpoint issue 30. The rank that was held up answers once the other one runs again."""
    # One after the other: if both are locked at once, neither answers again.
    start_two(session, host, tmp_path / "go", workload_pb2.MEMBER_ORDER_SEQUENTIAL)
    (tmp_path / "go").touch()
    wait_until(lambda: len(counters(host)) == 2, "the second counter uses its GPU")
    host.set_peers([process.pid for process in counters(host)])
    operation = SuspendOperation()
    operation.lock_timeout.FromSeconds(1)
    outcome = session.run("c2", "w1", suspend=operation)
    assert outcome.state == command_pb2.COMMAND_STATE_FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_DRIVER_TIMEOUT
    assert [process.state for process in counters(host)] == [ProcessState.RUNNING] * 2
    assert outcome.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_RUNNING


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"hang": True}, errors_pb2.ERROR_REASON_DRIVER_TIMEOUT),
        pytest.param({"error": 999}, errors_pb2.ERROR_REASON_DRIVER_ERROR, marks=pytest.mark.long),
    ],
    ids=["silent", "wrong"],
)
def test_a_driver_that_can_not_be_asked_for_members_rejects_the_command(
    session: Session, host: SimulatedHost, fault: dict[str, Any], reason: int
) -> None:
    pid = start(session, "w1")
    host.set_fault("get_restore_thread_id", pid, **fault)
    outcome = session.run("c2", "w1", suspend=SuspendOperation())
    assert outcome.state == command_pb2.COMMAND_STATE_REJECTED
    assert outcome.error.reason == reason
    host.clear_faults()
    process = host.process(pid)
    assert process is not None
    assert process.calls["lock"] == 0
    wait_counting(session, "w1")


@pytest.mark.long
def test_a_checkpoint_that_hangs_at_a_multicast_group_is_undone(
    session: Session, host: SimulatedHost
) -> None:
    pid = start(session, "w1")
    host.set_multicast(pid)
    outcome = session.run("c2", "w1", suspend=SuspendOperation())
    assert outcome.state == command_pb2.COMMAND_STATE_FAILED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_DRIVER_TIMEOUT
    assert outcome.workloads[0].status.state == workload_pb2.WORKLOAD_STATE_RUNNING
    wait_counting(session, "w1")
