"""Processes that ran before Leasehold knew them: taken in, registered by their host, and let go."""

import time

import grpc
import pytest
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.operation_pb2 import AdoptOperation
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    AdoptProcessResponse,
    GetWorkloadRequest,
    ListWorkloadsRequest,
    ReleaseWorkloadRequest,
    StopWorkloadRequest,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent

from tests.coordinator.api.test_command_service import ended, refusal, reported, start
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until

RUNNING, SUSPENDED, RELEASED, FAILED, PENDING = (
    workload_pb2.WORKLOAD_STATE_RUNNING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_RELEASED,
    workload_pb2.WORKLOAD_STATE_FAILED,
    workload_pb2.WORKLOAD_STATE_PENDING,
)
CLAIM, EXEC, ADOPT, RUN = (
    workload_pb2.WORKLOAD_ORIGIN_CLAIM,
    workload_pb2.WORKLOAD_ORIGIN_EXEC,
    workload_pb2.WORKLOAD_ORIGIN_ADOPT,
    workload_pb2.WORKLOAD_ORIGIN_RUN,
)


def adopt(
    coordinator: CoordinatorProcess,
    name: str = "taken",
    pid: int = 4711,
    worker: str = "alpha",
    request_id: str = "",
) -> AdoptProcessResponse:
    operation = AdoptOperation(name=name, pid=pid)
    return coordinator.workloads.AdoptProcess(
        AdoptProcessRequest(worker=worker, operation=operation, request_id=request_id)
    )


def find(coordinator: CoordinatorProcess, workload: str) -> Workload:
    return coordinator.workloads.GetWorkload(GetWorkloadRequest(workload=workload)).workload


def release(coordinator: CoordinatorProcess, workload: str) -> command_pb2.Command:
    return coordinator.workloads.ReleaseWorkload(ReleaseWorkloadRequest(workload=workload)).command


def claimed(
    workload_id: str = "w-claim",
    name: str = "mine",
    state: workload_pb2.WorkloadState.ValueType = RUNNING,
    generation: int = 1,
    origin: workload_pb2.WorkloadOrigin.ValueType = CLAIM,
) -> Workload:
    """A workload as the worker that registered it first tells it."""
    return Workload(
        workload_id=workload_id,
        name=name,
        origin=origin,
        user="ann",
        spec=WorkloadSpec(resources=Resources(gpu_count=1)),
        status=WorkloadStatus(state=state, generation=generation),
    )


def tell(worker: ScriptedWorker, workload: Workload) -> None:
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=workload)))


def wait_workload(coordinator: CoordinatorProcess, workload_id: str, generation: int = 1) -> Workload:
    """The workload once the coordinator has this generation of it."""
    deadline = time.monotonic() + 20
    while True:
        found = coordinator.workloads.ListWorkloads(ListWorkloadsRequest(include_ended=True)).workloads
        for workload in found:
            if workload.workload_id == workload_id and workload.status.generation >= generation:
                return workload
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_a_process_is_taken_in_and_let_go(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    answer = adopt(coordinator)
    workload, command = answer.workload, answer.command
    assert (workload.origin, workload.status.state, workload.name) == (ADOPT, PENDING, "taken")
    assert command.workload_id == workload.workload_id
    sent = worker.command("adopt").command.operation.adopt
    assert (sent.pid, sent.name) == (4711, "taken")
    taken = reported(workload, RUNNING, 1)
    taken.user, taken.spec.priority = "bob", 7
    worker.succeed("adopt", taken)
    found = find(coordinator, "taken")
    assert (found.origin, found.user, found.status.state) == (ADOPT, "bob", RUNNING)
    assert found.spec.priority == 7
    released = release(coordinator, "taken")
    assert released.timeout.seconds == 60
    worker.succeed("release", reported(workload, RELEASED, 2))
    assert find(coordinator, "taken").status.state == RELEASED
    assert not coordinator.workloads.ListWorkloads(ListWorkloadsRequest()).workloads
    again = release(coordinator, "taken")
    assert again.command_id != released.command_id, "what is so already is for the worker to say"
    adopt(coordinator, pid=4712)


def test_a_process_that_is_not_taken_in_is_no_workload(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    answer = adopt(coordinator, name="")
    assert answer.workload.name == answer.workload.workload_id == answer.command.operation.adopt.name
    worker.command("adopt")
    worker.update(answer.command.command_id, command_pb2.COMMAND_STATE_REJECTED)
    ended(coordinator, answer.command.command_id)
    assert find(coordinator, answer.workload.workload_id).status.state == FAILED


def test_a_hello_does_not_end_what_is_only_being_taken_in(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    adopt(coordinator)
    worker.command("adopt")
    back = coordinator.connect(make_hello())
    back.command("adopt")
    assert find(coordinator, "taken").status.state == PENDING


def test_the_same_request_creates_one_workload(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    first = adopt(coordinator, request_id="r-1")
    again = adopt(coordinator, request_id="r-1")
    assert again.workload.workload_id == first.workload.workload_id
    assert again.command.command_id == first.command.command_id


def test_what_can_not_be_adopted_is_refused(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    start(coordinator, worker)
    code = grpc.StatusCode
    for call, wanted in (
        (lambda: adopt(coordinator, pid=0), (code.INVALID_ARGUMENT, "INVALID_ARGUMENT")),
        (lambda: adopt(coordinator, pid=-1), (code.INVALID_ARGUMENT, "INVALID_ARGUMENT")),
        (lambda: adopt(coordinator, name="no name"), (code.INVALID_ARGUMENT, "INVALID_ARGUMENT")),
        (lambda: adopt(coordinator, name="one"), (code.ALREADY_EXISTS, "WORKLOAD_EXISTS")),
        (lambda: adopt(coordinator, worker="nobody"), (code.NOT_FOUND, "UNKNOWN_WORKER")),
    ):
        assert refusal(call) == wanted


@pytest.mark.parametrize("origin", [RUN, EXEC])
def test_what_leasehold_started_is_not_let_go(
    coordinator: CoordinatorProcess,
    worker: ScriptedWorker,
    origin: workload_pb2.WorkloadOrigin.ValueType,
) -> None:
    tell(worker, claimed(origin=origin))
    wait_workload(coordinator, "w-claim")
    with pytest.raises(grpc.RpcError, match="workload mine was started by Leasehold: stop it instead"):
        release(coordinator, "mine")
    assert refusal(lambda: release(coordinator, "mine"))[1] == "WRONG_STATE"


def test_what_is_parked_is_not_let_go(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    tell(worker, claimed(state=SUSPENDED))
    wait_workload(coordinator, "w-claim")
    with pytest.raises(grpc.RpcError, match="restore it first"):
        release(coordinator, "mine")


def test_what_was_started_here_has_its_origin(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    assert find(coordinator, "one").origin == RUN
    assert refusal(lambda: release(coordinator, "one"))[1] == "WRONG_STATE"


def test_what_a_host_registered_keeps_what_was_first_said_of_it(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    tell(worker, claimed())
    found = wait_workload(coordinator, "w-claim")
    assert (found.origin, found.user, found.spec.resources.gpu_count) == (CLAIM, "ann", 1)
    assert found.worker_id == "worker-alpha"
    assert found.create_time.seconds > 0
    tell(worker, reported(found, SUSPENDED, 2))
    later = wait_workload(coordinator, "w-claim", 2)
    assert later.status.state == SUSPENDED
    later.status.CopyFrom(found.status)
    assert later == found
    coordinator.restart()
    back = coordinator.connect(make_hello(workloads=[claimed(generation=3)]))
    back.welcome()
    assert wait_workload(coordinator, "w-claim", 3).create_time == found.create_time
    back.close()
    back = coordinator.connect(make_hello(workloads=[claimed(generation=2)]))  # with an old journal
    back.welcome()
    until(lambda: find(coordinator, "mine").status.generation == 2)
    stopped = coordinator.workloads.StopWorkload(StopWorkloadRequest(workload="mine")).command
    assert back.command("stop").command.command_id == stopped.command_id


def test_a_name_that_two_have_names_neither(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    for workload_id in ("w-1", "w-2"):
        tell(worker, claimed(workload_id))
        wait_workload(coordinator, workload_id)
    with pytest.raises(grpc.RpcError, match="give an id, one of w-1, w-2"):
        find(coordinator, "mine")
    assert refusal(lambda: release(coordinator, "mine"))[1] == "UNKNOWN_WORKLOAD"
    assert find(coordinator, "w-2").name == "mine"
    tell(worker, claimed("w-1", state=RELEASED, generation=2))
    wait_workload(coordinator, "w-1", 2)
    assert find(coordinator, "mine").workload_id == "w-2"


def test_a_workload_that_nobody_named_is_called_by_its_id(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    tell(worker, claimed(name=""))
    assert wait_workload(coordinator, "w-claim").name == "w-claim"
