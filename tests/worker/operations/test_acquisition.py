"""What runs of the coordinator take from helpers, and helpers from nobody."""

from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import command_pb2, errors_pb2, eviction_pb2, operation_pb2, workload_pb2
from leasehold.v1.operation_pb2 import RunOperation
from leasehold.v1.workload_pb2 import HelperTerms
from leasehold_simgpu import SimulatedHost
from leasehold_worker.operations.acquisition import WAITS_FOR_HELPERS

from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, wait_counting
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
NO_FREE_GPU = errors_pb2.ERROR_REASON_NO_FREE_GPU
STOP = operation_pb2.SuspendOperation(
    policy=eviction_pb2.EvictionPolicy(process_strategy=eviction_pb2.PROCESS_STRATEGY_STOP), force=True
)


def wait_for_helpers(session: Session, command_id: str) -> None:
    """Waits until a command waits for helpers."""
    session.wait(
        lambda frame: (
            frame.HasField("command_update")
            and frame.command_update.command_id == command_id
            and WAITS_FOR_HELPERS in frame.command_update.phase
        )
    )


@pytest.mark.long
def test_a_command_behind_a_claim_that_takes_all_is_refused_at_once(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    start_worker(host)
    session = coordinator.next_session()
    assert session.run("c1", "stopped", run=counter_run("stopped")).state == SUCCEEDED
    assert session.run("c2", "stopped", suspend=STOP).state == SUCCEEDED
    assert session.run("c3", "one", run=counter_run("one")).state == SUCCEEDED
    helper = helper_run("two", 2)
    helper.spec.helper.grace.seconds = 600
    assert session.run("c4", "two", run=helper).state == SUCCEEDED
    waiter = make_command("c5", "waiter", run=counter_run("waiter", 3))
    session.send(waiter)
    wait_for_helpers(session, "c5")
    restore, run = operation_pb2.RestoreOperation(), counter_run("later")
    for command_id, workload_id, operation in (
        ("c6", "stopped", {"restore": restore}),
        ("c7", "later", {"run": run}),
    ):
        refused = session.run(command_id, workload_id, **operation)
        assert refused.state == command_pb2.COMMAND_STATE_REJECTED
        assert refused.error.reason == NO_FREE_GPU
        assert "1 free, reserved for earlier claims" in refused.error.message
        assert not any(WAITS_FOR_HELPERS in phase for phase in phases(session, command_id))
    first = counter_run("first")
    first.spec.priority = 1
    assert session.run("c8", "first", run=first).state == SUCCEEDED, "it goes before the claim that waits"
    session.send(waiter, cancel=True)
    assert session.outcome("c5").error.reason == errors_pb2.ERROR_REASON_CANCELLED


@pytest.mark.long
def test_a_wait_for_helpers_that_times_out_ends_with_the_refusal(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    start_worker(host)
    session = coordinator.next_session()
    for number, (workload_id, suspend) in enumerate(
        (("stopped", STOP), ("suspended", operation_pb2.SuspendOperation()))
    ):
        assert session.run(f"r{number}", workload_id, run=counter_run(workload_id)).state == SUCCEEDED
        wait_counting(session, workload_id)
        assert session.run(f"s{number}", workload_id, suspend=suspend).state == SUCCEEDED
    helper = helper_run("helper", 4)
    helper.spec.helper.grace.seconds = 600
    assert session.run("c1", "helper", run=helper).state == SUCCEEDED
    restore = operation_pb2.RestoreOperation()
    for command, why in (
        (make_command("c2", "new", run=counter_run("new")), "4 match, 0 free (4 leased)"),
        (make_command("c3", "stopped", restore=restore), "4 match, 0 free (4 leased)"),
        (make_command("c4", "suspended", restore=restore), "no free NVIDIA H100"),
    ):
        command.timeout.CopyFrom(Duration(nanos=3 * 10**8))
        session.send(command)
        refused = session.outcome(command.command_id)
        assert any(WAITS_FOR_HELPERS in phase for phase in phases(session, command.command_id))
        assert refused.state == command_pb2.COMMAND_STATE_REJECTED
        assert refused.error.reason == NO_FREE_GPU
        assert why in refused.error.message


def helper_run(name: str, gpu_count: int) -> RunOperation:
    run = counter_run(name)
    run.spec.resources.gpu_count = gpu_count
    run.spec.helper.CopyFrom(HelperTerms(grace=Duration(nanos=10**7)))
    return run


@pytest.mark.long
def test_a_run_makes_helpers_give_way_and_a_helper_makes_nobody(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    start_worker(host)
    session = coordinator.next_session()
    assert session.run("c1", "helper", run=helper_run("helper", 4)).state == SUCCEEDED
    wait_counting(session, "helper")
    refused = session.run("c2", "second", run=helper_run("second", 1))
    assert refused.error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    assert session.run("c3", "one", run=counter_run("one")).state == SUCCEEDED
    assert WAITS_FOR_HELPERS in phases(session, "c3")
    wait_counting(session, "one")
    assert session.run("c4", "one", suspend=operation_pb2.SuspendOperation()).state == SUCCEEDED
    wait_counting(session, "helper")  # it got its GPUs back
    assert session.run("c5", "one", restore=operation_pb2.RestoreOperation()).state == SUCCEEDED
    assert f"preflight, {WAITS_FOR_HELPERS}" in phases(session, "c5")


def phases(session: Session, command_id: str) -> set[str]:
    """The phases that a command has shown."""
    updates = [frame.command_update for frame in session.frames if frame.HasField("command_update")]
    return {update.phase for update in updates if update.command_id == command_id}


@pytest.mark.long
def test_a_run_by_a_name_gets_what_it_had_before(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    start_worker(host)
    session = coordinator.next_session()
    again = counter_run("again")
    again.spec.resources.gpu_preference = workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE
    assert session.run("c1", "w1", run=counter_run("other")).state == SUCCEEDED
    first = session.run("c2", "w2", run=again).workloads[0].status.lease.gpu_uuids
    for number, workload_id in enumerate(("w1", "w2")):
        stop = operation_pb2.StopOperation(grace=Duration(nanos=10**7))
        assert session.run(f"s{number}", workload_id, stop=stop).state == SUCCEEDED
    assert list(first) == [host.gpus[1].uuid]
    assert session.run("c3", "w3", run=again).workloads[0].status.lease.gpu_uuids == first
