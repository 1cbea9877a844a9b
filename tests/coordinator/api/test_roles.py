"""Every method, called with every role: permitted or refused as its row says."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event
from typing import cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import (
    GrantRequest,
    ListBindingsRequest,
    RevokeRequest,
    RoleBinding,
    WhoAmIRequest,
)
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold.v1.workload_service_pb2 import ListCheckpointsRequest, PlanRequest
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold_coordinator.access.methods import METHODS
from leasehold_coordinator.access.roles import Role

from tests.coordinator.api.test_authentication import OF_OTHER_LISTENERS
from tests.coordinator.api.test_command_service import start
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker
from tests.coordinator.unix_users import ANN, BEN, channel_as, identity, needs_root

pytestmark = needs_root


def refusal(error: grpc.RpcError) -> tuple[str, str]:
    """The reason and the message of a refused call."""
    call = cast("grpc.Call", error)
    status = rpc_status.from_call(call)
    info = error_details_pb2.ErrorInfo()
    if status is not None:
        status.details[0].Unpack(info)
    return info.reason, call.details() or ""


def grant(coordinator: CoordinatorProcess, uid: int, role: Role) -> None:
    """Gives a Unix user exactly this role."""
    access = AccessServiceStub(coordinator.channel)
    for found in access.ListBindings(ListBindingsRequest()).bindings:
        if found.identity == identity(uid):
            access.Revoke(RevokeRequest(binding=found))
    if role:
        name = access_service_pb2.Role.Value(f"ROLE_{role.name}")
        access.Grant(GrantRequest(binding=RoleBinding(identity=identity(uid), role=name)))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """A coordinator without workers."""
    folder = tmp_path_factory.mktemp("roles")
    settings = folder / "coordinator.toml"
    settings.write_text("caller_requests_per_s = 10_000\n")  # one caller tries every method
    started = CoordinatorProcess(folder, options=["--config", str(settings)])
    started.start()
    yield started
    assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


@pytest.fixture
def ann(shared: CoordinatorProcess) -> Iterator[grpc.Channel]:
    """A channel of another Unix user."""
    with channel_as(shared.folder / "store.sock", ANN) as channel:
        yield channel


@pytest.mark.parametrize("role", Role)
def test_every_method_is_permitted_by_its_row_only(
    shared: CoordinatorProcess, ann: grpc.Channel, role: Role
) -> None:
    grant(shared, ANN, role)
    check_rows(ann, role, identity(ANN))


def check_rows(channel: grpc.Channel, role: Role, caller: str) -> None:
    """Calls every method, each of which must be refused for lack of a role as its row says, and no other.

    The methods for other credentials are no methods of the listener.
    """
    for method, needed in METHODS.items():
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
        reason = message = ""
        code = grpc.StatusCode.OK
        # Malformed, since the tests of a run share an authority.
        responses = call(b"\xff" if method.endswith("/RotateAuthority") else b"", timeout=20)
        try:
            next(responses, None)
        except grpc.RpcError as error:
            reason, message = refusal(error)
            code = cast("grpc.Call", error).code()
        finally:
            responses.cancel()
        is_refused = reason == "NOT_PERMITTED" and " role" in message
        is_missing = (code, message) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        assert is_missing == (needed in OF_OTHER_LISTENERS), (method, role, message)
        assert is_refused == (isinstance(needed, Role) and role < needed), (method, role, message)
        if role is Role.NONE and is_refused:
            assert message == (
                f"{caller} has no role: ask an admin for `leasehold access grant user {caller}`"
            )


def test_a_caller_learns_who_it_is(shared: CoordinatorProcess, ann: grpc.Channel) -> None:
    for role in (Role.NONE, Role.USER):
        grant(shared, ANN, role)
        found = AccessServiceStub(ann).WhoAmI(WhoAmIRequest())
        assert (found.identity, int(found.role)) == (identity(ANN), int(role))
    own = AccessServiceStub(shared.channel).WhoAmI(WhoAmIRequest())
    assert own.role == access_service_pb2.ROLE_ADMIN


def test_a_revoked_role_ends_streams_at_once(shared: CoordinatorProcess, ann: grpc.Channel) -> None:
    grant(shared, ANN, Role.VIEWER)
    grant(shared, BEN, Role.VIEWER)
    with ExitStack() as stack:
        ben = stack.enter_context(channel_as(shared.folder / "store.sock", BEN))
        lost = FleetServiceStub(ann).WatchFleet(WatchFleetRequest(), timeout=60)
        kept = FleetServiceStub(ben).WatchFleet(WatchFleetRequest(), timeout=60)
        assert next(lost).bookmark.snapshot_end
        assert next(kept).bookmark.snapshot_end
        grant(shared, ANN, Role.NONE)
        with pytest.raises(grpc.RpcError) as error:
            next(lost)
        assert refusal(error.value)[0] == "NOT_PERMITTED"
        shared.connect().welcome()
        assert next(kept).worker.name == "alpha"
        kept.cancel()


@pytest.mark.parametrize("method", ["Plan", "ListCheckpoints"])
def test_a_revoked_role_ends_a_call_that_waits_for_a_worker(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, method: str
) -> None:
    start(coordinator, worker)
    grant(coordinator, ANN, Role.OPERATOR)
    with channel_as(coordinator.folder / "store.sock", ANN) as channel:
        stub = WorkloadServiceStub(channel)
        asked = (
            stub.Plan.future(PlanRequest(workload="one", suspend=SuspendOperation()), timeout=60)
            if method == "Plan"
            else stub.ListCheckpoints.future(ListCheckpointsRequest(worker="alpha"), timeout=60)
        )
        worker.wait(  # and it never answers
            lambda frame: frame.HasField("plan_query") or frame.HasField("checkpoint_query")
        )
        grant(coordinator, ANN, Role.NONE)
        with pytest.raises(grpc.RpcError) as error:
            asked.result()
        assert refusal(error.value)[0] == "NOT_PERMITTED"


def test_a_stream_whose_view_changes_begins_again(shared: CoordinatorProcess, ann: grpc.Channel) -> None:
    grant(shared, ANN, Role.USER)
    watched = FleetServiceStub(ann).WatchFleet(WatchFleetRequest(), timeout=60)
    while not next(watched).bookmark.snapshot_end:
        pass
    grant(shared, ANN, Role.OPERATOR)
    with pytest.raises(grpc.RpcError) as error:
        next(watched)
    assert refusal(error.value)[0] in ("INVALID_TOKEN", "NOT_PERMITTED")  # revoked, then granted
    assert next(FleetServiceStub(ann).WatchFleet(WatchFleetRequest(), timeout=60))


def test_a_request_that_comes_after_the_revocation_of_its_role_is_refused(
    shared: CoordinatorProcess, ann: grpc.Channel
) -> None:
    grant(shared, ANN, Role.ADMIN)
    own = RoleBinding(identity=identity(BEN), role=access_service_pb2.ROLE_ADMIN)
    revoked = Event()

    def late() -> Iterator[bytes]:
        revoked.wait(60)
        yield GrantRequest(binding=own).SerializeToString()

    method: grpc.StreamUnaryMultiCallable[bytes, bytes] = ann.stream_unary(
        "/leasehold.v1.AccessService/Grant"
    )
    call = method.future(late(), timeout=60)
    AccessServiceStub(ann).WhoAmI(WhoAmIRequest())  # the headers of the call before have arrived
    grant(shared, ANN, Role.NONE)
    revoked.set()
    error = call.exception()
    assert isinstance(error, grpc.RpcError)
    assert refusal(error)[0] == "NOT_PERMITTED"
    listed = AccessServiceStub(shared.channel).ListBindings(ListBindingsRequest()).bindings
    assert identity(BEN) not in [one.identity for one in listed if one.role == own.role]


def test_others_leave_places_for_the_coordinators_own_user(coordinator: CoordinatorProcess) -> None:
    """A user of the host may have many user ids (subuid(5)), and needs no role for some calls."""
    coordinator.end(signal.SIGTERM)
    coordinator.prelude = (
        "from leasehold_coordinator.api import rpc_errors\n"
        "rpc_errors.CALL_LIMIT, rpc_errors.REQUEST_TIMEOUT_S = 6, 600\n"
    )
    coordinator.start()
    over = Event()

    def never() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    with ExitStack() as stack:
        for uid in (ANN, BEN, BEN + 1, BEN + 2):
            channel = stack.enter_context(channel_as(coordinator.folder / "store.sock", uid))
            method: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
                "/leasehold.v1.AccessService/WhoAmI"
            )
            refused: SimpleQueue[str] = SimpleQueue()
            for _ in range(4):
                call = method.future(never(), timeout=60)
                call.add_done_callback(
                    lambda ended, refused=refused: refused.put(refusal(ended.exception())[0])  # type: ignore[misc]
                )
            assert refused.get(timeout=30) == "TOO_MANY_CALLS"
        assert AccessServiceStub(coordinator.channel).WhoAmI(WhoAmIRequest()).identity
        over.set()


def test_roles_outlive_the_coordinator(coordinator: CoordinatorProcess) -> None:
    grant(coordinator, ANN, Role.VIEWER)
    with channel_as(coordinator.folder / "store.sock", ANN) as channel:
        assert not FleetServiceStub(channel).ListWorkers(ListWorkersRequest()).workers
    coordinator.restart()
    [found] = AccessServiceStub(coordinator.channel).ListBindings(ListBindingsRequest()).bindings
    assert (found.identity, found.role) == (identity(ANN), access_service_pb2.ROLE_VIEWER)
    assert found.granted_by.startswith("local/")
    with channel_as(coordinator.folder / "store.sock", ANN) as channel:
        assert not FleetServiceStub(channel).ListWorkers(ListWorkersRequest()).workers


@pytest.mark.parametrize(
    ("binding", "field"),
    [
        (RoleBinding(), "identity"),
        (RoleBinding(identity="worker/alpha", role=access_service_pb2.ROLE_ADMIN), "identity"),
        (RoleBinding(identity="user/*", role=access_service_pb2.ROLE_ADMIN), "identity"),
        (RoleBinding(identity="user/ann"), "role"),
        (RoleBinding(identity="user/ann", role=access_service_pb2.ROLE_VIEWER, users="user/*"), "users"),
        (
            RoleBinding(identity="user/ann", role=access_service_pb2.ROLE_ON_BEHALF_OF, users="user/*"),
            "identity",
        ),
        (RoleBinding(identity="service/batch", role=access_service_pb2.ROLE_ON_BEHALF_OF), "users"),
        (
            RoleBinding(identity="service/batch", role=access_service_pb2.ROLE_ON_BEHALF_OF, users="local/*"),
            "users",
        ),
    ],
)
def test_an_invalid_binding_is_refused(shared: CoordinatorProcess, binding: RoleBinding, field: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        AccessServiceStub(shared.channel).Grant(GrantRequest(binding=binding))
    assert refusal(error.value)[0] == "INVALID_ARGUMENT"
    status = rpc_status.from_call(cast("grpc.Call", error.value))
    assert status is not None
    violation = error_details_pb2.BadRequest()
    status.details[1].Unpack(violation)
    assert violation.field_violations[0].field == f"binding.{field}"


def test_an_unknown_binding_is_refused(shared: CoordinatorProcess) -> None:
    unknown = RoleBinding(identity="user/nobody", role=access_service_pb2.ROLE_VIEWER)
    with pytest.raises(grpc.RpcError) as error:
        AccessServiceStub(shared.channel).Revoke(RevokeRequest(binding=unknown))
    assert refusal(error.value)[0] == "UNKNOWN_BINDING"
