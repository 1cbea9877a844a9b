"""What the worker says of a request for a new workload, before there is a command."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.errors_pb2 import Error
from leasehold.v1.hook_pb2 import Hook, SignalHook
from leasehold.v1.operation_pb2 import AdoptOperation
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    CreateWorkloadRequest,
    ListWorkloadsRequest,
)
from leasehold.worker.v1.session_pb2 import PlanAnswer, ProtocolVersion
from leasehold_coordinator.commands.plans import NEW_WORKLOADS_MINOR

from tests.coordinator.api.test_command_service import SPEC, refusal
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

HOOKS = [Hook(name="flush", signal=SignalHook(signal_number=10))]
HOOKED = WorkloadSpec(arguments=["program"], resources=Resources(gpu_count=1), hooks=HOOKS)
BAD_PHASE = Error(
    reason=errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
    message="hook flush has no phase",
    metadata={"field": "spec.hooks[0].phase"},
)
BUSY_GPU = Error(reason=errors_pb2.ERROR_REASON_NO_FREE_GPU, message="a claim was first")
INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
ADOPTION = AdoptOperation(pid=7, hooks=HOOKS)


@pytest.fixture
def checker(coordinator: CoordinatorProcess) -> ScriptedWorker:
    """A worker that checks new workloads."""
    hello = make_hello(protocol_version=ProtocolVersion(major=1, minor=NEW_WORKLOADS_MINOR))
    connected = coordinator.connect(hello)
    connected.welcome()
    return connected


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def create(coordinator: CoordinatorProcess, aside: ThreadPoolExecutor, **fields: Any) -> Future[Any]:
    request = CreateWorkloadRequest(**{"spec": SPEC, **fields})
    return aside.submit(coordinator.workloads.CreateWorkload, request, timeout=20)


def adopt(coordinator: CoordinatorProcess, aside: ThreadPoolExecutor, **fields: Any) -> Future[Any]:
    request = AdoptProcessRequest(worker="alpha", operation=ADOPTION, **fields)
    return aside.submit(coordinator.workloads.AdoptProcess, request, timeout=20)


def answer(*refusals: Error) -> PlanAnswer:
    return PlanAnswer(plan=Plan(refusals=refusals))


def nothing(coordinator: CoordinatorProcess) -> bool:
    """Whether neither a workload nor a command was created."""
    workloads = coordinator.workloads.ListWorkloads(ListWorkloadsRequest(include_ended=True)).workloads
    return not workloads and not coordinator.commands.ListCommands(ListCommandsRequest()).commands


@pytest.mark.long
def test_a_rule_that_only_the_worker_knows_refuses_the_request(
    coordinator: CoordinatorProcess, checker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    creation = create(coordinator, aside, spec=HOOKED)
    assert checker.answer_plan(answer(BAD_PHASE)).operation.run.spec == HOOKED
    assert refusal(lambda: creation.result(20)) == INVALID
    adoption = adopt(coordinator, aside)
    assert checker.answer_plan(answer(BAD_PHASE), 1).operation.adopt.pid == 7
    assert refusal(lambda: adoption.result(20)) == INVALID
    assert nothing(coordinator)


def test_what_depends_on_the_moment_is_left_to_the_command(
    coordinator: CoordinatorProcess, checker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    creation = create(coordinator, aside, spec=HOOKED)
    checker.answer_plan(answer(BUSY_GPU))
    assert creation.result(20).command.operation.run.spec.hooks
    assert checker.command("run")


def test_a_request_without_hooks_asks_nobody(
    coordinator: CoordinatorProcess, checker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    assert create(coordinator, aside).result(20).command.command_id
    assert not [frame for frame in checker.frames if frame.HasField("plan_query")]


@pytest.mark.parametrize("refused", [BAD_PHASE, BUSY_GPU], ids=["rule", "moment"])
def test_a_validation_asks_the_worker_everything(
    coordinator: CoordinatorProcess, checker: ScriptedWorker, aside: ThreadPoolExecutor, refused: Error
) -> None:
    name = errors_pb2.ErrorReason.Name(refused.reason).removeprefix("ERROR_REASON_")
    creation = create(coordinator, aside, validate_only=True)
    checker.answer_plan(answer(refused))
    assert refusal(lambda: creation.result(20))[1] == name
    adoption = adopt(coordinator, aside, validate_only=True)
    checker.answer_plan(answer(refused), 1)
    assert refusal(lambda: adoption.result(20))[1] == name
    assert nothing(coordinator)


def test_a_validation_invents_no_id_and_takes_no_request_id(
    coordinator: CoordinatorProcess, checker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    creation = create(coordinator, aside, validate_only=True, request_id="r-1")
    checker.answer_plan(answer())
    response = creation.result(20)
    assert not response.HasField("command")
    workload = response.workload
    assert (workload.workload_id, workload.name, workload.worker_id) == ("", "", "worker-alpha")
    assert workload.spec == SPEC
    assert not workload.HasField("status")
    assert not workload.HasField("create_time")
    adoption = adopt(coordinator, aside, validate_only=True, request_id="r-1")
    checker.answer_plan(answer(), 1)
    assert adoption.result(20) == type(adoption.result())()
    assert nothing(coordinator)
    assert create(coordinator, aside, request_id="r-1", name="one").result(20).command.command_id


def test_a_worker_that_does_not_know_secret_variables_gets_none(
    coordinator: CoordinatorProcess, checker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    spec = WorkloadSpec(arguments=["program"], secret_environment={"TOKEN": "value"})
    creation = create(coordinator, aside, spec=spec)
    assert refusal(lambda: creation.result(20))[1] == "UNSUPPORTED_CAPABILITY"
    assert nothing(coordinator)
