"""Requests about workloads that the service itself refuses."""

from functools import partial

import grpc
from leasehold.v1.workload_service_pb2 import ReleaseHoldRequest

from tests.coordinator.api.test_command_service import refusal
from tests.coordinator.conftest import CoordinatorProcess


def test_a_release_of_a_hold_names_the_hold(coordinator: CoordinatorProcess) -> None:
    for hold_id, code, reason in (
        ("", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        ("x" * 257, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        ("c-1", grpc.StatusCode.NOT_FOUND, "UNKNOWN_HOLD"),
    ):
        request = ReleaseHoldRequest(hold_id=hold_id)
        assert refusal(partial(coordinator.workloads.ReleaseHold, request)) == (code, reason)
