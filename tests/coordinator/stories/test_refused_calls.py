"""Refused calls in the audit: each names its caller and the resource that it named."""

from collections.abc import Callable, Iterator
from threading import Event

import grpc
import pytest
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.fleet_service_pb2 import DeleteWorkerRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_service_pb2 import (
    ReadWorkloadOutputRequest,
    StopWorkloadRequest,
    WatchWorkloadsRequest,
)
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold_coordinator.access.roles import Role

from tests.coordinator.api.test_command_service import refusal, start
from tests.coordinator.api.test_roles import grant
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker
from tests.coordinator.stories.test_audit import entries
from tests.coordinator.stories.test_lifecycle import until
from tests.coordinator.unix_users import ANN, channel_as, identity, needs_root

pytestmark = needs_root


@pytest.fixture
def ann(coordinator: CoordinatorProcess) -> Iterator[grpc.Channel]:
    """A channel of a Unix user, who has no role."""
    with channel_as(coordinator.folder / "store.sock", ANN) as channel:
        yield channel


def refused(coordinator: CoordinatorProcess, method: str) -> AuditEntry:
    """The entry of the only refusal of a method, once it is stored."""
    wanted = f"outcome = REFUSED AND method:{method}"
    until(lambda: bool(entries(coordinator, wanted)))
    (entry,) = entries(coordinator, wanted)
    assert (entry.identity, entry.count) == (identity(ANN), 1)
    return entry


def test_a_refusal_by_role_names_the_resource(coordinator: CoordinatorProcess, ann: grpc.Channel) -> None:
    fleet, workloads = FleetServiceStub(ann), WorkloadServiceStub(ann)
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "DeleteWorker": (
            lambda: fleet.DeleteWorker(DeleteWorkerRequest(worker="al\npha")),
            "worker/al\\npha",
        ),
        "StopWorkload": (
            # An invalid value does not hide the resource.
            lambda: workloads.StopWorkload(StopWorkloadRequest(workload="w", expected_generation=-1)),
            "workload/w",
        ),
        "WatchWorkloads": (
            lambda: list(workloads.WatchWorkloads(WatchWorkloadsRequest(workload="w"))),
            "workload/w",
        ),
        "WatchFleet": (lambda: list(fleet.WatchFleet(WatchFleetRequest())), ""),
    }
    for method, (call, resource) in calls.items():
        assert refusal(call)[1] == "NOT_PERMITTED"
        assert refused(coordinator, method).resource == resource


def test_a_refusal_by_ownership_names_the_resource(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, ann: grpc.Channel
) -> None:
    start(coordinator, worker)
    grant(coordinator, ANN, Role.USER)
    workloads = WorkloadServiceStub(ann)
    asked = ReadWorkloadOutputRequest(workload="one")
    assert refusal(lambda: workloads.StopWorkload(StopWorkloadRequest(workload="one")))[1] == "NOT_PERMITTED"
    assert refusal(lambda: list(workloads.ReadWorkloadOutput(asked)))[1] == "NOT_PERMITTED"
    for method in ("StopWorkload", "ReadWorkloadOutput"):
        assert refused(coordinator, method).resource == "workload/one"


def test_a_malformed_request_names_nothing(coordinator: CoordinatorProcess, ann: grpc.Channel) -> None:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = ann.unary_unary(
        "/leasehold.v1.FleetService/DeleteWorker"
    )
    assert refusal(lambda: call(b"\xff", timeout=20))[1] == "NOT_PERMITTED"
    assert refused(coordinator, "DeleteWorker").resource == ""


def test_a_caller_that_sends_no_request_is_refused_and_has_an_entry(
    coordinator: CoordinatorProcess, ann: grpc.Channel
) -> None:
    over = Event()

    def never() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    for method, ends in (("DeleteWorker", False), ("Cordon", True)):
        path = f"/leasehold.v1.FleetService/{method}"
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = ann.stream_unary(path)
        ending = call.future(never(), timeout=60)
        FleetServiceStub(ann).WatchFleet(WatchFleetRequest()).code()  # the headers before have arrived
        if ends:
            ending.cancel()
        else:
            assert refusal(ending.result)[1] == "NOT_PERMITTED"
        assert refused(coordinator, method).resource == ""
    over.set()
