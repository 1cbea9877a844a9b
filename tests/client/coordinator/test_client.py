"""The Python client against a scripted coordinator."""

import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    errors_pb2,
    fleet_service_pb2,
    worker_pb2,
    workload_service_pb2,
)
from leasehold.v1.command_pb2 import Command
from leasehold.v1.hook_pb2 import Hook
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.v1.workload_service_pb2 import ReadWorkloadOutputRequest, ReadWorkloadOutputResponse
from leasehold_client import Client, CommandFailedError, LeaseholdError, NoCoordinatorError, UsageError

from tests.client.scripted_coordinator import A, B, C, ScriptedCoordinator, command, refuse

FAILED, PENDING, RUNNING, SUCCEEDED = (
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_PENDING,
    command_pb2.COMMAND_STATE_RUNNING,
    command_pb2.COMMAND_STATE_SUCCEEDED,
)
OUTPUT = b"0123456789"


def test_a_client_that_another_thread_closes_is_told_so(scripted: ScriptedCoordinator) -> None:
    """gRPC may end the process at such a call, and mostly raises ValueError."""
    client = Client(scripted.address)

    def closing_meanwhile(request: Any, timeout: float) -> Any:
        client.close()
        raise ValueError("Cannot invoke RPC on closed channel!")

    method: Any = closing_meanwhile
    with pytest.raises(LeaseholdError, match="this client is closed: make another one"):
        client._connection.once(method, fleet_service_pb2.ListWorkersRequest())


def test_a_watch_whose_client_is_closed_is_told_so(scripted: ScriptedCoordinator) -> None:
    ended = threading.Event()

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[fleet_service_pb2.WatchFleetResponse]:
        yield fleet_service_pb2.WatchFleetResponse()
        ended.wait(30)

    scripted.answers["WatchFleet"] = watch
    client = Client(scripted.address)
    responses = client.watch_fleet()
    next(responses)
    client.close()
    with pytest.raises(LeaseholdError, match="this client is closed: make another one"):
        next(responses)
    ended.set()


def test_a_client_that_is_closed_makes_no_call(scripted: ScriptedCoordinator) -> None:
    """The first call on a closed channel ended the process by SIGSEGV."""
    with Client(scripted.address) as client:
        pass
    for call in (client.workers, lambda: next(iter(client.watch_workloads()))):
        with pytest.raises(LeaseholdError, match="this client is closed: make another one"):
            call()


def test_an_offset_out_of_range_is_a_usage_error(scripted: ScriptedCoordinator) -> None:
    with Client(scripted.address) as client, pytest.raises(UsageError, match="invalid offset 1000"):
        next(client.output("one", offset=10**30))


def piece_by_piece(
    request: ReadWorkloadOutputRequest, context: grpc.ServicerContext
) -> Iterator[ReadWorkloadOutputResponse]:
    """Four bytes of the output, and then the connection breaks unless it was the last."""
    end = min(request.offset + 4, len(OUTPUT))
    yield ReadWorkloadOutputResponse(data=OUTPUT[request.offset : end], next_offset=end)
    if end < len(OUTPUT):
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


def test_a_watch_that_breaks_goes_on_and_tells_each_change_once(scripted: ScriptedCoordinator) -> None:
    def watch(
        request: Any, context: grpc.ServicerContext
    ) -> Iterator[command_service_pb2.WatchCommandResponse]:
        before = len(scripted.asked(command_service_pb2.WatchCommandRequest)) - 1
        yield command_service_pb2.WatchCommandResponse(command=command(PENDING, 1))
        yield command_service_pb2.WatchCommandResponse(command=command(RUNNING, 2))
        if before == 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if before == 1:
            return
        yield command_service_pb2.WatchCommandResponse(command=command(SUCCEEDED, 3))

    scripted.answers["WatchCommand"] = watch
    with Client(scripted.address) as client:
        seen = [current.revision for current in client.watch(Command(command_id="c-1"))]
    assert seen == [1, 2, 3]
    assert len(scripted.asked(command_service_pb2.WatchCommandRequest)) == 3


@pytest.mark.usefixtures("short_outages")
def test_a_wait_without_a_coordinator_ends() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(NoCoordinatorError):
        client.wait(Command(command_id="c-1"))


@pytest.mark.usefixtures("short_outages")
def test_a_watch_that_never_tells_anything_ends(scripted: ScriptedCoordinator) -> None:
    scripted.answers["WatchCommand"] = lambda request, context: iter(())
    with Client(scripted.address) as client, pytest.raises(NoCoordinatorError, match="the command continues"):
        client.wait(Command(command_id="c-1"))


@pytest.mark.parametrize("follow", [False, True])
def test_output_goes_on_where_it_broke(scripted: ScriptedCoordinator, follow: bool) -> None:
    scripted.answers["ReadWorkloadOutput"] = piece_by_piece
    with Client(scripted.address) as client:
        assert b"".join(client.output("one", follow=follow)) == OUTPUT
    requests = scripted.asked(ReadWorkloadOutputRequest)
    assert [request.offset for request in requests] == [0, 4, 8]
    assert {request.workload for request in requests} == {"id-of-one"}


def test_output_of_a_worker_out_of_contact_is_waited_for_once_it_has_begun(
    scripted: ScriptedCoordinator,
) -> None:
    def read(
        request: ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[ReadWorkloadOutputResponse]:
        if len(scripted.asked(ReadWorkloadOutputRequest)) == 2:
            refuse(context, grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE", "out of contact", 0.05)
        yield from piece_by_piece(request, context)

    scripted.answers["ReadWorkloadOutput"] = read
    with Client(scripted.address) as client:
        assert b"".join(client.output("one")) == OUTPUT


def test_output_that_is_not_to_be_had_is_an_error_at_once(scripted: ScriptedCoordinator) -> None:
    def read(request: Any, context: grpc.ServicerContext) -> Iterator[ReadWorkloadOutputResponse]:
        refuse(context, grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE", "out of contact", 0.05)
        yield from ()

    scripted.answers["ReadWorkloadOutput"] = read
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="out of contact"):
        b"".join(client.output("one"))
    assert len(scripted.asked(ReadWorkloadOutputRequest)) == 1


def test_a_wait_raises_unless_the_command_succeeded(scripted: ScriptedCoordinator) -> None:
    failed = command(FAILED, 2)
    failed.operation.suspend.SetInParent()
    failed.error.reason = errors_pb2.ERROR_REASON_LOCK_TIMEOUT
    failed.error.message = "the lock timed out"
    failed.error.metadata["pid"] = "7"
    scripted.plays(command(RUNNING, 1), failed)
    with Client(scripted.address) as client:
        assert client.wait(Command(command_id="c-1"), check=False).state == FAILED
        with pytest.raises(CommandFailedError, match=r"^suspend FAILED: the lock timed out$") as error:
            client.wait(Command(command_id="c-1"))
    assert (error.value.reason, error.value.metadata) == ("LOCK_TIMEOUT", {"pid": "7"})
    assert error.value.command == failed


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e10])
@pytest.mark.parametrize(
    "call",
    [
        lambda client, timeout_s: client.wait(command(PENDING), timeout_s=timeout_s),
        lambda client, timeout_s: next(client.watch(command(PENDING), timeout_s=timeout_s)),
        lambda client, timeout_s: client.wait_workload("one", timeout_s=timeout_s),
        lambda client, timeout_s: client.suspend("one", timeout_s=timeout_s),
    ],
    ids=["wait", "watch", "wait_workload", "suspend"],
)
def test_a_timeout_that_grpc_cannot_take_is_refused_before_any_call(
    scripted: ScriptedCoordinator, call: Callable[[Client, float], object], timeout_s: float
) -> None:
    with Client(scripted.address) as client, pytest.raises(UsageError, match="is not a time in seconds"):
        call(client, timeout_s)
    assert not scripted.requests


def test_the_longest_timeout_is_waited_for(scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(SUCCEEDED, 2))
    with Client(scripted.address) as client:
        assert client.wait(command(PENDING), timeout_s=1e9).state == SUCCEEDED


def test_a_wait_for_an_id_is_told_how_to_get_the_command(scripted: ScriptedCoordinator) -> None:
    command_id: Any = "c-1"
    with (
        Client(scripted.address) as client,
        pytest.raises(UsageError, match="'c-1' is not a Command: pass"),
    ):
        client.wait(command_id)


def test_errors_show_no_traceback_of_grpc(scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKLOAD", "no workload 'missing'"
    )
    with Client(scripted.address) as client, pytest.raises(LeaseholdError) as error:
        client.suspend("missing")
    shown = "".join(traceback.format_exception(error.value))
    assert "no workload 'missing'" in shown
    assert "_InactiveRpcError" not in shown


def test_a_refusal_has_its_reason_code_and_facts(scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKLOAD", "no workload 'missing'"
    )
    with Client(scripted.address) as client, pytest.raises(LeaseholdError) as error:
        client.suspend("missing")
    assert error.value.reason == "UNKNOWN_WORKLOAD"
    assert error.value.message == "no workload 'missing'"
    assert error.value.metadata == {"field": "x"}
    assert error.value.code is grpc.StatusCode.NOT_FOUND


def test_a_refusal_with_a_reason_is_no_missing_coordinator(scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE", "worker alpha is LOST"
    )
    with Client(scripted.address) as client, pytest.raises(LeaseholdError) as error:
        client.suspend("one")
    assert not isinstance(error.value, NoCoordinatorError)
    assert error.value.reason == "WORKER_UNAVAILABLE"


def test_every_request_has_an_id_of_its_own(scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(PENDING))
    with Client(scripted.address) as client:
        client.suspend("one")
        client.suspend("one")
    request_ids = [
        request.request_id for request in scripted.asked(workload_service_pb2.SuspendWorkloadRequest)
    ]
    assert len(set(request_ids)) == 2
    assert all(request_ids)


def test_lists_are_read_to_their_last_page(scripted: ScriptedCoordinator) -> None:
    pages = {
        "": fleet_service_pb2.ListGpusResponse(
            gpus=[worker_pb2.FleetGpu(worker_id="w-1")], next_page_token="more", unreachable=["w-3"]
        ),
        "more": fleet_service_pb2.ListGpusResponse(
            gpus=[worker_pb2.FleetGpu(worker_id="w-2")], unreachable=["w-3", "w-4"]
        ),
    }
    scripted.answers["ListGpus"] = lambda request, context: pages[request.page_token]
    with Client(scripted.address) as client:
        listed = client.list_gpus()
    assert [gpu.worker_id for gpu in listed.gpus] == ["w-1", "w-2"]
    assert list(listed.unreachable) == ["w-3", "w-4"]


def test_a_remap_carries_its_pairs(scripted: ScriptedCoordinator) -> None:
    scripted.answers["RemapWorkloads"] = lambda request, context: (
        workload_service_pb2.RemapWorkloadsResponse()
    )
    with Client(scripted.address) as client:
        client.remap({"one": [(A, B), (B, C)], "two": [(C, A)]}, lock_timeout_s=2.5, timeout_s=1.5)
    [request] = scripted.asked(workload_service_pb2.RemapWorkloadsRequest)
    moves = [
        (move.workload_id, [(pair.old_uuid, pair.new_uuid) for pair in move.pairs])
        for move in request.operation.moves
    ]
    assert moves == [("one", [(A, B), (B, C)]), ("two", [(C, A)])]
    assert request.timeout.ToMilliseconds() == 1500
    assert request.operation.lock_timeout.ToMilliseconds() == 2500


def test_times_that_are_not_given_are_the_workers(scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(PENDING))
    scripted.answers["StopWorkload"] = lambda request, context: workload_service_pb2.StopWorkloadResponse()
    with Client(scripted.address) as client:
        client.suspend("one")
        client.suspend("one", lock_timeout_s=0.5)
        client.stop("one")
        client.stop("one", grace_s=0, force=True)
    plain, quick = scripted.asked(workload_service_pb2.SuspendWorkloadRequest)
    assert not plain.operation.HasField("lock_timeout")
    assert quick.operation.lock_timeout.ToMilliseconds() == 500
    gentle, forced = scripted.asked(workload_service_pb2.StopWorkloadRequest)
    assert not gentle.operation.HasField("grace")
    assert not gentle.operation.force
    assert forced.operation.HasField("grace")
    assert forced.operation.force


def test_a_plan_is_asked_for_with_the_operation_of_its_verb(scripted: ScriptedCoordinator) -> None:
    plan = Plan(released_gpu_uuids=[A])
    scripted.answers["Plan"] = lambda request, context: workload_service_pb2.PlanResponse(plan=plan)
    with Client(scripted.address) as client:
        assert client.plan_suspend("one", lock_timeout_s=0.5) == plan
        assert client.plan_restore("one", gpu_uuids=[B, A]) == plan
        assert client.plan_remap({"one": [(A, B)], "two": [(B, A)]}, lock_timeout_s=1) == plan
    suspend, restore, remap = scripted.asked(workload_service_pb2.PlanRequest)
    assert (suspend.workload, restore.workload, remap.workload) == ("one", "one", "")
    assert suspend.suspend.lock_timeout.ToMilliseconds() == 500
    assert list(restore.restore.gpu_uuids) == [B, A]
    assert [move.workload_id for move in remap.remap.moves] == ["one", "two"]
    assert remap.remap.lock_timeout.ToMilliseconds() == 1000


def test_a_cancel_returns_the_command_and_is_asked_for_again_when_its_answer_is_lost(
    scripted: ScriptedCoordinator,
) -> None:
    def answer(request: Any, context: grpc.ServicerContext) -> command_service_pb2.CancelCommandResponse:
        if len(scripted.requests) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return command_service_pb2.CancelCommandResponse(command=command(RUNNING))

    scripted.answers["CancelCommand"] = answer
    with Client(scripted.address) as client:
        assert client.cancel("c-1").state == RUNNING
    assert [request.command_id for request in scripted.asked(command_service_pb2.CancelCommandRequest)] == [
        "c-1"
    ] * 2


def test_a_method_that_the_coordinator_lacks(scripted: ScriptedCoordinator) -> None:
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="UNIMPLEMENTED") as error:
        client.workers()
    assert error.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert not error.value.reason


@pytest.mark.parametrize(
    ("hooks", "checkpoint_id", "validate_only", "least_s"),
    [
        (0, "", False, 8),
        (0, "ck-1", False, 13),
        (1, "", False, 30),
        (0, "", True, 30),
        (1, "ck-1", False, 45),
    ],
)
def test_a_run_waits_for_the_questions_that_the_coordinator_asks_workers(
    scripted: ScriptedCoordinator, hooks: int, checkpoint_id: str, validate_only: bool, least_s: float
) -> None:
    """A worker has 10 s to list checkpoints, and 30 s to check hooks. Then the coordinator says why."""
    left_s: list[float] = []

    def answer(_: Any, context: grpc.ServicerContext) -> workload_service_pb2.CreateWorkloadResponse:
        left_s.append(context.time_remaining())
        return workload_service_pb2.CreateWorkloadResponse()

    scripted.answers["CreateWorkload"] = answer
    spec = WorkloadSpec(arguments=["program"], hooks=[Hook()] * hooks)
    with Client(scripted.address) as client:
        client.run(spec, checkpoint_id=checkpoint_id, validate_only=validate_only)
    assert least_s < left_s[0] < least_s + 7


@pytest.mark.parametrize(("hooks", "least_s"), [(0, 8), (1, 30)])
def test_an_adoption_waits_for_the_check_of_its_hooks(
    scripted: ScriptedCoordinator, hooks: int, least_s: float
) -> None:
    left_s: list[float] = []

    def answer(_: Any, context: grpc.ServicerContext) -> workload_service_pb2.AdoptProcessResponse:
        left_s.append(context.time_remaining())
        return workload_service_pb2.AdoptProcessResponse()

    scripted.answers["AdoptProcess"] = answer
    with Client(scripted.address) as client:
        client.adopt(1, worker="alpha", hooks=[Hook()] * hooks)
    assert least_s < left_s[0] < least_s + 7
