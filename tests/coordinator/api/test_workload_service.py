"""Requests about workloads that the service itself refuses."""

from functools import partial

import grpc
from google.protobuf.duration_pb2 import Duration
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold.v1.workload_service_pb2 import DeleteWorkloadRequest, ReleaseHoldRequest

from tests.coordinator.api.test_command_service import refusal, start, suspend
from tests.coordinator.api.test_watches import exit_workload
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker


def test_a_release_of_a_hold_names_the_hold(coordinator: CoordinatorProcess) -> None:
    for hold_id, code, reason in (
        ("", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        ("x" * 257, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        ("c-1", grpc.StatusCode.NOT_FOUND, "UNKNOWN_HOLD"),
    ):
        request = ReleaseHoldRequest(hold_id=hold_id)
        assert refusal(partial(coordinator.workloads.ReleaseHold, request)) == (code, reason)


def test_a_repeated_release_finds_its_command_after_the_record_of_the_suspend_was_deleted(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    suspend(coordinator, operation=SuspendOperation(hold_for=Duration(seconds=60)))
    hold_id = worker.succeed("suspend")
    request = ReleaseHoldRequest(request_id="r-1", hold_id=hold_id)
    released = coordinator.workloads.ReleaseHold(request).command
    worker.succeed("release_hold")
    exit_workload(coordinator, worker, started)
    coordinator.workloads.DeleteWorkload(DeleteWorkloadRequest(workload="one"))
    assert coordinator.workloads.ReleaseHold(request).command.command_id == released.command_id
    request.request_id = "r-2"
    refused = refusal(partial(coordinator.workloads.ReleaseHold, request))
    assert refused == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_HOLD")
