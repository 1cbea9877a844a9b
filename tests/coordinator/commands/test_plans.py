"""What an operation would do: asked of the worker, with what the coordinator alone can refuse."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2, plan_pb2, workload_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.errors_pb2 import Error, ErrorReason
from leasehold.v1.fleet_service_pb2 import CordonRequest
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.operation_pb2 import (
    CordonOperation,
    Move,
    Operation,
    RemapOperation,
    RestoreOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    PlanRequest,
    RemapWorkloadsRequest,
    RestoreWorkloadRequest,
    StopWorkloadRequest,
    SuspendWorkloadRequest,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, PlanAnswer, WorkloadEvent
from leasehold_coordinator.core.command_ledger import UNFINISHED_LIMIT

from tests.coordinator.api.test_command_service import SPEC, refusal, reported, start, suspend
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import state_of, until

Code = grpc.StatusCode
SUSPEND = Operation(suspend=SuspendOperation())
THEIRS = Error(
    reason=errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
    message="too little",
    metadata={"pid": "7", "message": "a key like any other"},
)
PLAN = Plan(
    released_gpu_uuids=["GPU-alpha-0"],
    checks=[plan_pb2.Check(name="driver", result=plan_pb2.CHECK_RESULT_PASSED)],
    refusals=[THEIRS],
)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """For calls that wait while the test plays the worker."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


def plan_request(
    operation: Operation | None, workload: str = "", generation: int | None = None
) -> PlanRequest:
    request = PlanRequest(workload=workload, expected_generation=generation)
    if operation is not None and (kind := operation.WhichOneof("kind")):
        getattr(request, kind).CopyFrom(getattr(operation, kind))
    return request


def ask(
    coordinator: CoordinatorProcess, aside: ThreadPoolExecutor, workload: str, operation: Operation
) -> Future[Plan]:
    request = plan_request(operation, workload)
    return aside.submit(lambda: coordinator.workloads.Plan(request, timeout=20).plan)


def swap(first: str = "one", second: str = "two") -> Operation:
    a, b = "GPU-alpha-0", "GPU-alpha-1"
    moves = [
        Move(workload_id=first, pairs=[GpuPair(old_uuid=a, new_uuid=b)]),
        Move(workload_id=second, pairs=[GpuPair(old_uuid=b, new_uuid=a)]),
    ]
    return Operation(remap=RemapOperation(moves=moves))


def reasons(plan: Plan) -> list[str]:
    return [ErrorReason.Name(refusal.reason).removeprefix("ERROR_REASON_") for refusal in plan.refusals]


def end(worker: ScriptedWorker, workload: Workload) -> None:
    event = WorkloadEvent(workload=reported(workload, workload_pb2.WORKLOAD_STATE_EXITED, 9))
    worker.up.put(ConnectRequest(workload_event=event))


def test_a_plan_is_the_workers_and_changes_nothing(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    started = start(coordinator, worker)
    for number, operation in enumerate([SUSPEND, Operation(restore=RestoreOperation(gpu_uuids=["x"]))]):
        asked = ask(coordinator, aside, "one", operation)
        query = worker.answer_plan(PlanAnswer(plan=PLAN), number)
        assert (query.workload_id, query.operation) == (started.workload_id, operation)
        assert asked.result(20) == PLAN
    assert len(coordinator.commands.ListCommands(ListCommandsRequest()).commands) == 1
    assert state_of(coordinator) == workload_pb2.WORKLOAD_STATE_RUNNING


def test_the_names_in_moves_become_ids(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    one, two = start(coordinator, worker), start(coordinator, worker, "two")
    asked = ask(coordinator, aside, "", swap("one", two.workload_id))
    query = worker.answer_plan(PlanAnswer(plan=Plan()))
    assert not query.workload_id
    assert query.operation == swap(one.workload_id, two.workload_id)
    assert asked.result(20) == Plan()


def test_the_coordinators_refusals_come_first_and_none_is_told_twice(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    start(coordinator, worker)
    command = suspend(coordinator)
    request = plan_request(SUSPEND, "one", generation=7)
    asked = aside.submit(lambda: coordinator.workloads.Plan(request, timeout=20).plan)
    busy = Error(reason=errors_pb2.ERROR_REASON_WORKLOAD_BUSY, message="the same, as the worker says it")
    worker.answer_plan(PlanAnswer(plan=Plan(refusals=[busy, THEIRS])))
    plan = asked.result(20)
    assert reasons(plan) == ["WORKLOAD_BUSY", "GENERATION_MISMATCH", "INSUFFICIENT_HOST_MEMORY"]
    assert plan.refusals[0].metadata["command_id"] == command.command_id
    assert plan.refusals[2] == THEIRS


def test_every_busy_workload_of_a_remap_is_told_and_a_command_that_names_both_once(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    for name in ("one", "two"):
        start(coordinator, worker, name)
    coordinator.workloads.RemapWorkloads(RemapWorkloadsRequest(operation=swap().remap))
    asked = ask(coordinator, aside, "", swap("two", "one"))
    worker.answer_plan(PlanAnswer(plan=Plan()))
    assert reasons(asked.result(20)) == ["WORKLOAD_BUSY"]


@pytest.mark.long
def test_a_worker_with_many_commands(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    start(coordinator, worker)
    operation = CordonOperation(reason="x", cordoned_by="me")
    for _ in range(UNFINISHED_LIMIT // 2):
        worker.report()  # a busy host may take longer than a worker may be silent
        coordinator.fleet.Cordon(CordonRequest(worker="alpha", operation=operation))
    asked = ask(coordinator, aside, "one", SUSPEND)
    worker.answer_plan(PlanAnswer(plan=Plan()))
    assert reasons(asked.result(20)) == ["TOO_MANY_COMMANDS"]


def test_workloads_on_different_workers_are_a_refusal_that_no_worker_is_asked_for(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    beta = coordinator.connect(make_hello("beta", gpu_count=4))
    beta.welcome()
    start(coordinator, beta, "two")
    plan = coordinator.workloads.Plan(plan_request(swap()), timeout=20).plan
    assert reasons(plan) == ["INVALID_ARGUMENT"]
    assert "one and two are on different workers" in plan.refusals[0].message
    for asked in (worker, beta):
        assert not any(frame.HasField("plan_query") for frame in asked.frames)


def test_a_workload_that_its_worker_has_no_more_or_not_yet_is_refused_here(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    end(worker, start(coordinator, worker))
    until(lambda: state_of(coordinator) == workload_pb2.WORKLOAD_STATE_EXITED)
    coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="new", spec=SPEC))
    plans = [
        coordinator.workloads.Plan(plan_request(SUSPEND, name), timeout=20).plan for name in ("one", "new")
    ]
    assert [reasons(plan) for plan in plans] == [["WRONG_STATE"], ["WORKLOAD_BUSY", "WRONG_STATE"]]
    assert "one is EXITED" in plans[0].refusals[0].message


def test_what_has_no_plan_is_refused_with_the_field(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    bad = (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")

    def plan(operation: Operation | None, workload: str = "one") -> Callable[[], object]:
        request = plan_request(operation, workload)
        return lambda: coordinator.workloads.Plan(request, timeout=20)

    def drained_in(seconds: int) -> Operation:
        return Operation(suspend=SuspendOperation(lock_timeout=Duration(seconds=seconds)))

    pair = GpuPair(old_uuid="x" * 100, new_uuid="y" * 100)
    huge = Operation(remap=RemapOperation(moves=[Move(workload_id="one", pairs=[pair] * 1000)]))
    cases: list[tuple[Callable[[], object], tuple[grpc.StatusCode, str]]] = [
        (plan(None), bad),
        (plan(swap()), bad),
        (plan(Operation(remap=RemapOperation()), ""), bad),
        (plan(Operation(remap=RemapOperation(moves=[Move(workload_id="one")])), ""), bad),
        (plan(swap("one", "one"), ""), bad),
        (plan(huge, ""), bad),
        (plan(drained_in(0)), bad),
        (plan(drained_in(-1)), bad),
        (plan(drained_in(10**11)), bad),
        (plan(SUSPEND, "no"), (Code.NOT_FOUND, "UNKNOWN_WORKLOAD")),
        (plan(swap("one", "no"), ""), (Code.NOT_FOUND, "UNKNOWN_WORKLOAD")),
    ]
    for number, (call, wanted) in enumerate(cases):
        assert (number, refusal(call)) == (number, wanted)
    assert not any(frame.HasField("plan_query") for frame in worker.frames)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            PlanAnswer(error=Error(reason=errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD, message="not here")),
            (Code.NOT_FOUND, "UNKNOWN_WORKLOAD"),
        ),
        (PlanAnswer(), (Code.INTERNAL, "PROTOCOL_VIOLATION")),
    ],
)
def test_a_worker_that_makes_no_plan(
    coordinator: CoordinatorProcess,
    worker: ScriptedWorker,
    aside: ThreadPoolExecutor,
    answer: PlanAnswer,
    wanted: tuple[grpc.StatusCode, str],
) -> None:
    start(coordinator, worker)
    asked = ask(coordinator, aside, "one", SUSPEND)
    worker.answer_plan(answer)
    assert refusal(lambda: asked.result(20)) == wanted


def test_a_worker_that_leaves_while_it_is_asked_or_is_gone(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    start(coordinator, worker)
    asked = ask(coordinator, aside, "one", SUSPEND)
    worker.wait(lambda frame: frame.HasField("plan_query"))
    worker.close()
    gone = (Code.UNAVAILABLE, "WORKER_UNAVAILABLE")
    assert refusal(lambda: asked.result(20)) == gone
    request = plan_request(SUSPEND, "one")
    assert refusal(lambda: coordinator.workloads.Plan(request, timeout=20)) == gone
    with pytest.raises(grpc.RpcError, match="`leasehold describe worker alpha` has its last events"):
        coordinator.workloads.Plan(request, timeout=20)


def test_validate_only_is_refused_as_its_plan_is(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    start(coordinator, worker)
    start(coordinator, worker, "two")
    calls = coordinator.workloads
    validations: list[Callable[[], object]] = [
        lambda: calls.SuspendWorkload(SuspendWorkloadRequest(workload="one", validate_only=True)),
        lambda: calls.RestoreWorkload(RestoreWorkloadRequest(workload="one", validate_only=True)),
        lambda: calls.RemapWorkloads(RemapWorkloadsRequest(operation=swap().remap, validate_only=True)),
    ]
    refused = PlanAnswer(plan=Plan(refusals=[THEIRS, Error(message="another")]))
    for number, validate in enumerate(validations):
        asked = aside.submit(validate)
        worker.answer_plan(refused, 2 * number)
        wanted = (Code.RESOURCE_EXHAUSTED, "INSUFFICIENT_HOST_MEMORY")
        assert refusal(lambda asked=asked: asked.result(20)) == wanted  # type: ignore[misc]
        asked = aside.submit(validate)
        worker.answer_plan(PlanAnswer(plan=Plan(warnings=["slow"])), 2 * number + 1)
        assert not asked.result(20).HasField("command")  # type: ignore[attr-defined]
    assert len(coordinator.commands.ListCommands(ListCommandsRequest()).commands) == 2


def test_validate_only_answers_nothing_of_an_earlier_request(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    start(coordinator, worker)
    suspend(coordinator, request_id="r1")
    request = SuspendWorkloadRequest(workload="one", request_id="r1", validate_only=True)
    asked = aside.submit(lambda: coordinator.workloads.SuspendWorkload(request))
    worker.answer_plan(PlanAnswer(plan=Plan()))
    assert refusal(lambda: asked.result(20)) == (Code.ABORTED, "WORKLOAD_BUSY")


def test_a_grace_out_of_range(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    start(coordinator, worker)
    for seconds in (-1, 10**11):
        operation = StopOperation(grace=Duration(seconds=seconds))
        request = StopWorkloadRequest(workload="one", operation=operation)
        wanted = (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        assert refusal(lambda request=request: coordinator.workloads.StopWorkload(request)) == wanted  # type: ignore[misc]
    at_once = StopOperation(grace=Duration(), force=True)
    coordinator.workloads.StopWorkload(StopWorkloadRequest(workload="one", operation=at_once))
    assert worker.command("stop").command.operation.stop == at_once
