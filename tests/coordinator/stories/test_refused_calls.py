"""Refused calls in the audit: each names its caller and the resource that it named."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from typing import cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from leasehold.v1.access_service_pb2 import ROLE_USER, RevokeRequest, RoleBinding
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.errors_pb2 import ERROR_REASON_NOT_PERMITTED, ERROR_REASON_TOO_MANY_CALLS
from leasehold.v1.fleet_service_pb2 import DeleteWorkerRequest, ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.operation_pb2 import DeleteCheckpointsOperation, RestoreOperation, SuspendOperation
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    DeleteCheckpointsRequest,
    DeleteWorkloadRequest,
    GetWorkloadRequest,
    ListCheckpointsRequest,
    ReadWorkloadOutputRequest,
    ReleaseHoldRequest,
    RestoreWorkloadRequest,
    StopWorkloadRequest,
    UpdateWorkloadRequest,
    WatchWorkloadsRequest,
)
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold.worker.v1.session_pb2 import CheckpointAnswer
from leasehold_coordinator.access.roles import Role

from tests.coordinator.api.test_command_service import SPEC, refusal, start, suspend
from tests.coordinator.api.test_roles import grant
from tests.coordinator.conftest import SHORT_REQUESTS, CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker
from tests.coordinator.stories.test_audit import entries
from tests.coordinator.stories.test_lifecycle import until
from tests.coordinator.stories.test_owners import OWN
from tests.coordinator.unix_users import ANN, channel_as, identity, needs_root

pytestmark = needs_root


@pytest.fixture
def ann(coordinator: CoordinatorProcess) -> Iterator[grpc.Channel]:
    """A channel of a Unix user, who has no role."""
    with channel_as(coordinator.folder / "store.sock", ANN) as channel:
        yield channel


def refused(coordinator: CoordinatorProcess, method: str, reason: str = "NOT_PERMITTED") -> AuditEntry:
    """The entry of the only refusal of a method for a reason, once it is stored."""
    wanted = f"outcome = REFUSED AND method:{method} AND reason = {reason}"
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


def test_holds_of_others_are_unknown_to_the_caller_and_named_in_the_audit(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, ann: grpc.Channel
) -> None:
    start(coordinator, worker)
    hold_id = suspend(coordinator, operation=SuspendOperation(hold_for=Duration(seconds=60))).command_id
    grant(coordinator, ANN, Role.USER)
    workloads = WorkloadServiceStub(ann)
    own = workloads.CreateWorkload(CreateWorkloadRequest(name="own", spec=SPEC)).workload.workload_id
    calls: dict[str, Callable[[str], object]] = {
        "CreateWorkload": lambda hold: workloads.CreateWorkload(
            CreateWorkloadRequest(spec=SPEC, hold_id=hold)
        ),
        "RestoreWorkload": lambda hold: workloads.RestoreWorkload(
            RestoreWorkloadRequest(workload=own, operation=RestoreOperation(hold_id=hold))
        ),
        "ReleaseHold": lambda hold: workloads.ReleaseHold(ReleaseHoldRequest(hold_id=hold)),
    }
    for method, call in calls.items():
        answers = []
        for asked in ("c-none", hold_id):
            with pytest.raises(grpc.RpcError) as error:
                call(asked)
            answers.append(str(status_of(error.value)).replace(asked, ""))
        assert "UNKNOWN_HOLD" in answers[0]
        assert answers[0] == answers[1], "nothing is learnt"
        assert "hold/c-none" in refused(coordinator, method, "UNKNOWN_HOLD").resource.split(", ")
        entry = refused(coordinator, method)
        assert f"hold/{hold_id}" in entry.resource.split(", ")
        assert entry.reason == ERROR_REASON_NOT_PERMITTED
        assert entry.message.startswith(f"hold {hold_id} belongs to {OWN}, and ")


def test_checkpoints_of_others_are_unknown_to_the_caller_and_named_in_the_audit(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, ann: grpc.Channel
) -> None:
    workload = start(coordinator, worker)
    grant(coordinator, ANN, Role.USER)
    workloads = WorkloadServiceStub(ann)
    own = workloads.CreateWorkload(CreateWorkloadRequest(name="own", spec=SPEC)).workload.workload_id
    found = CheckpointAnswer(checkpoints=[Checkpoint(checkpoint_id="k-1", workload_id=workload.workload_id)])
    calls: dict[str, Callable[[str], object]] = {
        "CreateWorkload": lambda checkpoint: workloads.CreateWorkload(
            CreateWorkloadRequest(spec=SPEC, checkpoint_id=checkpoint)
        ),
        "RestoreWorkload": lambda checkpoint: workloads.RestoreWorkload(
            RestoreWorkloadRequest(workload=own, operation=RestoreOperation(checkpoint_id=checkpoint))
        ),
        "DeleteCheckpoints": lambda checkpoint: workloads.DeleteCheckpoints(
            DeleteCheckpointsRequest(
                worker="alpha", operation=DeleteCheckpointsOperation(checkpoint_ids=[checkpoint])
            )
        ),
    }
    answered = count()
    with ThreadPoolExecutor(1) as threads:
        for method, call in calls.items():
            answers = []
            for asked in ("k-none", "k-1"):
                made = threads.submit(call, asked)
                worker.answer_checkpoints(found, next(answered))
                error = made.exception(20)
                assert isinstance(error, grpc.RpcError)
                answers.append(str(status_of(error)).replace(asked, ""))
            assert "UNKNOWN_CHECKPOINT" in answers[0]
            assert answers[0] == answers[1], "nothing is learnt"
            unknown = refused(coordinator, method, "UNKNOWN_CHECKPOINT")
            assert "checkpoint/k-none" in unknown.resource.split(", ")
            entry = refused(coordinator, method)
            assert "checkpoint/k-1" in entry.resource.split(", ")
            assert entry.message.startswith(f"checkpoint k-1 belongs to {OWN}, and ")


def status_of(error: grpc.RpcError) -> Status:
    """All that the caller of a refused call gets."""
    status = rpc_status.from_call(cast("grpc.Call", error))
    assert status is not None
    return status


def test_a_malformed_request_names_nothing(coordinator: CoordinatorProcess, ann: grpc.Channel) -> None:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = ann.unary_unary(
        "/leasehold.v1.FleetService/DeleteWorker"
    )
    assert refusal(lambda: call(b"\xff", timeout=20))[1] == "NOT_PERMITTED"
    assert refused(coordinator, "DeleteWorker").resource == ""


def test_a_caller_that_sends_no_request_is_refused_and_has_an_entry(
    coordinator: CoordinatorProcess, ann: grpc.Channel
) -> None:
    coordinator.prelude = SHORT_REQUESTS
    coordinator.restart()
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


def test_every_refused_change_has_an_entry_and_no_other_read(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, ann: grpc.Channel
) -> None:
    workload = start(coordinator, worker)
    grant(coordinator, ANN, Role.ADMIN)
    workloads, fleet, access = WorkloadServiceStub(ann), FleetServiceStub(ann), AccessServiceStub(ann)
    reads: dict[str, Callable[[], object]] = {
        "UNKNOWN_WORKLOAD": lambda: workloads.GetWorkload(GetWorkloadRequest(workload="nobody")),
        "UNKNOWN_WORKER": lambda: workloads.ListCheckpoints(ListCheckpointsRequest(worker="nobody")),
        "INVALID_ARGUMENT": lambda: fleet.ListWorkers(ListWorkersRequest(filter="(")),
        "INVALID_TOKEN": lambda: fleet.ListWorkers(ListWorkersRequest(page_token="x")),
    }
    for reason, read in reads.items():
        assert refusal(read)[1] == reason
    one = Workload(workload_id=workload.workload_id, labels={"a": "b"}, etag="other")
    binding = RoleBinding(identity="user/nobody", role=ROLE_USER)
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = ann.unary_unary("/leasehold.v1.FleetService/Uncordon")
    changes: list[tuple[str, str, str, Callable[[], object]]] = [
        ("StopWorkload", "UNKNOWN_WORKLOAD", "workload/no\\nbody", lambda: stop(workloads, "no\nbody")),
        ("StopWorkload", "INVALID_ARGUMENT", "workload/one", lambda: stop(workloads, "one", -1)),
        ("StopWorkload", "GENERATION_MISMATCH", "workload/one", lambda: stop(workloads, "one", 99)),
        ("Uncordon", "INVALID_ARGUMENT", "", lambda: call(b"\xff", timeout=20)),
        (
            "UpdateWorkload",
            "ETAG_MISMATCH",
            f"workload/{workload.workload_id}",
            lambda: workloads.UpdateWorkload(UpdateWorkloadRequest(workload=one)),
        ),
        (
            "DeleteWorkload",
            "WRONG_STATE",
            "workload/one",
            lambda: workloads.DeleteWorkload(DeleteWorkloadRequest(workload="one")),
        ),
        (
            "DeleteWorker",
            "WORKER_CONNECTED",
            "worker/alpha",
            lambda: fleet.DeleteWorker(DeleteWorkerRequest(worker="alpha")),
        ),
        (
            "Revoke",
            "UNKNOWN_BINDING",
            "binding/user/nobody",
            lambda: access.Revoke(RevokeRequest(binding=binding)),
        ),
    ]
    for method, reason, resource, change in changes:
        assert refusal(change)[1] == reason
        assert refused(coordinator, method, reason).resource == resource
    found = {entry.method.rpartition("/")[2] for entry in entries(coordinator, "outcome = REFUSED")}
    assert found == {method for method, *_ in changes}


def stop(workloads: WorkloadServiceStub, name: str, generation: int = 0) -> object:
    return workloads.StopWorkload(StopWorkloadRequest(workload=name, expected_generation=generation))


@pytest.mark.long
def test_a_flood_has_an_entry_and_hides_no_refusal_for_lack_of_a_right(
    coordinator: CoordinatorProcess,
) -> None:
    """The bound counts for reads too, and its refusals for the caller."""
    settings = coordinator.folder / "coordinator.toml"
    settings.write_text("caller_requests_per_s = 10\n")
    coordinator.end(signal.SIGTERM)
    coordinator.options = ["--config", str(settings)]
    coordinator.start()
    grant(coordinator, ANN, Role.VIEWER)
    with channel_as(coordinator.folder / "store.sock", ANN) as channel:
        fleet = FleetServiceStub(channel)
        asked = [fleet.ListWorkers.future(ListWorkersRequest(), timeout=60) for _ in range(60)]
        ended = Counter(refusal(one.result)[1] if one.exception() is not None else "" for one in asked)
        assert ended.keys() == {"", "TOO_MANY_CALLS"}
        wanted = "outcome = REFUSED AND method:ListWorkers"
        until(lambda: bool(entries(coordinator, wanted)))
        until(lambda: refusal(lambda: fleet.DeleteWorker(DeleteWorkerRequest(worker="w")))[1] == DENIED)
    refused(coordinator, "DeleteWorker")
    coordinator.end(signal.SIGTERM)
    coordinator.start()
    flood = entries(coordinator, wanted)
    assert {(entry.identity, entry.reason) for entry in flood} == {
        (identity(ANN), ERROR_REASON_TOO_MANY_CALLS)
    }
    assert sum(entry.count for entry in flood) == ended["TOO_MANY_CALLS"]


DENIED = "NOT_PERMITTED"
