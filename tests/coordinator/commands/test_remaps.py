"""A remap of several workloads is one command, and keeps each of them busy."""

from collections.abc import Callable

import grpc
import pytest
from leasehold.v1 import workload_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.operation_pb2 import Move, RemapOperation, RestoreOperation
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    GetWorkloadRequest,
    RemapWorkloadsRequest,
    RestoreWorkloadRequest,
    StopWorkloadRequest,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent

from tests.coordinator.api.test_command_service import SPEC, ended, refusal, reported, start, suspend
from tests.coordinator.commands.test_plans import swap
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import state_of, until

Code = grpc.StatusCode
BUSY = (Code.ABORTED, "WORKLOAD_BUSY")
RUNNING, SUSPENDED, UNKNOWN, WEDGED = (
    workload_pb2.WORKLOAD_STATE_RUNNING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_UNKNOWN,
    workload_pb2.WORKLOAD_STATE_WEDGED,
)


def remap(coordinator: CoordinatorProcess, *names: str, **fields: object) -> Callable[[], object]:
    operation = swap(*names).remap
    request = RemapWorkloadsRequest(operation=operation, **fields)  # type: ignore[arg-type]  # fields by name
    return lambda: coordinator.workloads.RemapWorkloads(request).command


def test_a_swap_is_one_command_that_keeps_both_busy(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    one, two = start(coordinator, worker), start(coordinator, worker, "two")
    command = coordinator.workloads.RemapWorkloads(RemapWorkloadsRequest(operation=swap().remap)).command
    assert command.workload_id == one.workload_id
    sent = worker.command("remap").command
    assert sent.operation == swap(one.workload_id, two.workload_id)
    for name in ("one", "two"):
        assert refusal(lambda name=name: suspend(coordinator, name)) == BUSY  # type: ignore[misc]
    assert refusal(remap(coordinator, "two", "one")) == BUSY
    stop = StopWorkloadRequest(workload="two")
    assert refusal(lambda: coordinator.workloads.StopWorkload(stop)) == BUSY
    worker.succeed("remap", reported(one, RUNNING, 2), reported(two, RUNNING, 3))
    assert ended(coordinator, command.command_id).error.message == ""
    generations = [
        coordinator.workloads.GetWorkload(GetWorkloadRequest(workload=name)).workload.status.generation
        for name in ("one", "two")
    ]
    assert generations == [2, 3]
    assert suspend(coordinator, "two").workload_id == two.workload_id


@pytest.mark.parametrize("busy", ["one", "two"])
def test_each_workload_of_a_remap_must_be_idle(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, busy: str
) -> None:
    for name in ("one", "two"):
        start(coordinator, worker, name)
    suspend(coordinator, busy)
    assert refusal(remap(coordinator)) == BUSY


def test_a_swap_that_the_coordinator_stored_keeps_both_busy_after_a_restart(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    one, two = start(coordinator, worker), start(coordinator, worker, "two")
    remap(coordinator)()
    worker.command("remap")
    coordinator.restart()
    coordinator.connect(
        make_hello(workloads=[reported(one, RUNNING, 1), reported(two, RUNNING, 1)])
    ).welcome()
    assert refusal(lambda: suspend(coordinator, "two")) == BUSY


def test_what_a_remap_may_not_name(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    one, two = start(coordinator, worker), start(coordinator, worker, "two")
    beta = coordinator.connect(make_hello("beta", gpu_count=4))
    beta.welcome()
    start(coordinator, beta, "far")
    bad = (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    wrong = (Code.FAILED_PRECONDITION, "WRONG_STATE")
    pair = GpuPair(old_uuid="a", new_uuid="b")

    def moves(*moves: Move) -> Callable[[], object]:
        request = RemapWorkloadsRequest(operation=RemapOperation(moves=moves))
        return lambda: coordinator.workloads.RemapWorkloads(request)

    assert refusal(remap(coordinator, "one", "far")) == bad
    assert refusal(remap(coordinator, "one", one.workload_id)) == bad
    assert refusal(moves(Move(workload_id="one", pairs=[pair]), Move(workload_id="two"))) == bad
    assert refusal(remap(coordinator, "one", "no")) == (Code.NOT_FOUND, "UNKNOWN_WORKLOAD")
    assert refusal(remap(coordinator, expected_generation=5)) == (Code.ABORTED, "GENERATION_MISMATCH")
    for generation, state in enumerate((SUSPENDED, UNKNOWN, WEDGED), 2):
        event = WorkloadEvent(workload=reported(two, state, generation))
        worker.up.put(ConnectRequest(workload_event=event))
        until(lambda state=state: state_of(coordinator, "two") == state)  # type: ignore[misc]
        assert refusal(remap(coordinator)) == wrong
    assert len(coordinator.commands.ListCommands(ListCommandsRequest()).commands) == 3


def test_gpus_that_any_move_names_are_taken_from_then_on(coordinator: CoordinatorProcess) -> None:
    worker = coordinator.connect(make_hello(gpu_count=4))
    worker.welcome()
    for name in ("one", "two"):
        start(coordinator, worker, name)
    pairs = {"one": "GPU-alpha-2", "two": "GPU-alpha-3"}
    moves = [
        Move(workload_id=name, pairs=[GpuPair(old_uuid="GPU-alpha-0", new_uuid=new)])
        for name, new in pairs.items()
    ]
    coordinator.workloads.RemapWorkloads(RemapWorkloadsRequest(operation=RemapOperation(moves=moves)))
    for uuid in pairs.values():
        taken = CreateWorkloadRequest(gpu_uuids=[uuid])
        taken.spec.arguments.append("program")
        call = lambda taken=taken: coordinator.workloads.CreateWorkload(taken)  # noqa: E731
        assert refusal(call) == (Code.RESOURCE_EXHAUSTED, "NO_FREE_GPU")
    coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=SPEC))


@pytest.mark.long
@pytest.mark.parametrize("gpu_uuids", [[], ["GPU-alpha-1"]])
def test_a_workload_whose_state_is_not_known_is_restored_and_not_suspended(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, gpu_uuids: list[str]
) -> None:
    started = start(coordinator, worker)
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=reported(started, UNKNOWN, 2))))
    until(lambda: state_of(coordinator) == UNKNOWN)
    with pytest.raises(grpc.RpcError, match="restore it, which examines its processes again, or stop it"):
        suspend(coordinator)
    operation = RestoreOperation(gpu_uuids=gpu_uuids)
    coordinator.workloads.RestoreWorkload(RestoreWorkloadRequest(workload="one", operation=operation))
    worker.succeed("restore", reported(started, RUNNING, 3))
    until(lambda: state_of(coordinator) == RUNNING)


def test_a_wedged_workload_is_stopped_and_nothing_else(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=reported(started, WEDGED, 2))))
    until(lambda: state_of(coordinator) == WEDGED)
    calls = coordinator.workloads
    wrong = (Code.FAILED_PRECONDITION, "WRONG_STATE")
    assert refusal(lambda: suspend(coordinator)) == wrong
    assert refusal(lambda: calls.RestoreWorkload(RestoreWorkloadRequest(workload="one"))) == wrong
    calls.StopWorkload(StopWorkloadRequest(workload="one"))
    assert worker.command("stop")
