"""A unary call ends after 35 s, and its place is free again."""

import signal

import grpc
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold.v1.workload_service_pb2 import PlanRequest

from tests.coordinator.api.test_command_service import refusal, start
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import make_hello


def test_a_call_that_takes_too_long_is_ended(coordinator: CoordinatorProcess) -> None:
    coordinator.end(signal.SIGTERM)
    coordinator.prelude = "from leasehold_coordinator.api import rpc_errors; rpc_errors.CALL_TIMEOUT_S = 0.5"
    coordinator.start()
    worker = coordinator.connect(make_hello())
    worker.welcome()
    start(coordinator, worker)
    asked = PlanRequest(workload="one", suspend=SuspendOperation())  # the worker never answers
    assert refusal(lambda: coordinator.workloads.Plan(asked, timeout=20)) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "CALL_TIMEOUT",
    )
