"""Every method of every service on every listener: called with each role, as a worker, and by nobody."""

import signal
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path
from typing import cast

import grpc
import pytest
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.enrolment_service_pb2 import CreateJoinTokenRequest
from leasehold.v1.enrolment_service_pb2_grpc import EnrolmentServiceStub
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold_client.config import credentials_directory
from leasehold_coordinator.access.methods import METHODS
from leasehold_coordinator.access.roles import Credential, Role
from leasehold_coordinator.commands.enrolment import JOIN, RENEW
from leasehold_coordinator.storage.rows import binding_row

from tests.certificates import Holder, enrol, write_rows
from tests.coordinator.api.test_authentication import CONNECT
from tests.coordinator.api.test_roles import refusal
from tests.coordinator.commands.test_enrolment import read_ticket
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import make_hello
from tests.coordinator.server.test_own_pki import near
from tests.coordinator.stories.test_audit import entries
from tests.coordinator.stories.test_lifecycle import until

USERS = {role: f"user/{role.name.lower()}" for role in Role}
CLIENT_METHODS = {method for method, needed in METHODS.items() if isinstance(needed, Role)}
CALLERS = [*Role, Credential.WORKER, None]
"""Clients by their roles, a worker, and a caller without an identity."""


class Answer(Enum):
    """How a listener answers a call."""

    PERMITTED = auto()
    """Also if the request is refused for another reason."""
    NO_ROLE = auto()
    UNKNOWN_CALLER = auto()
    NO_METHOD = auto()


def answer(channel: grpc.Channel, method: str) -> Answer:
    """Calls a method with an empty request."""
    call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
    # Malformed, since the tests of a run share an authority.
    responses = call(b"\xff" if method.endswith("/RotateAuthority") else b"", timeout=20)
    try:
        next(responses, None)
    except grpc.RpcError as error:
        reason, message = refusal(error)
        if (cast("grpc.Call", error).code(), message) == (
            grpc.StatusCode.UNIMPLEMENTED,
            "Method not found!",
        ):
            return Answer.NO_METHOD
        if reason == "UNAUTHENTICATED":
            return Answer.UNKNOWN_CALLER
        if reason == "NOT_PERMITTED" and " role" in message:
            return Answer.NO_ROLE
    finally:
        responses.cancel()
    return Answer.PERMITTED


class Listeners:
    """A coordinator that requires certificates, and the holders of some."""

    def __init__(self, folder: Path, prelude: str = "") -> None:
        settings = folder / "coordinator.toml"
        settings.write_text("caller_requests_per_s = 10_000\n")  # one caller tries every method
        options = ["--config", str(settings), "--join-listen", "127.0.0.1:0"]
        self.coordinator = CoordinatorProcess(folder, "0.0.0.0:0", "0.0.0.0:0", 5.0, prelude, options)
        database = folder / "store.sqlite3"
        holders = enrol(database, credentials_directory(), *USERS.values(), "worker/alpha")
        self.worker = holders.pop()
        self.users = dict(zip(Role, holders, strict=True))
        roles = (access_service_pb2.Role.Value(f"ROLE_{role.name}") for role in USERS if role)
        names = (identity for role, identity in USERS.items() if role)
        bindings = (RoleBinding(identity=name, role=role) for name, role in zip(names, roles, strict=True))
        write_rows(database, *map(binding_row, bindings))
        self.coordinator.start()
        self.clients, self.workers = near(self.coordinator.address), near(self.coordinator.worker_address)
        with self.users[Role.ADMIN].open_channel(self.clients) as channel:
            asked = CreateJoinTokenRequest(identity="worker/beta")
            self.ticket = read_ticket(EnrolmentServiceStub(channel).CreateJoinToken(asked).ticket)

    def open(self, address: str, held: Role | Credential | None) -> grpc.Channel:
        """A channel of a caller."""
        holder: Holder = self.worker if held is Credential.WORKER else self.users[Role(held or 0)]  # type: ignore[arg-type]
        if held is None:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(holder.roots))
        return holder.open_channel(address)

    def stop(self) -> None:
        """Ends the coordinator."""
        assert self.coordinator.end(signal.SIGTERM) == 0
        assert "Traceback" not in self.coordinator.log()


@pytest.fixture(scope="module")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listeners]:
    """A coordinator for all tests of this module."""
    started = Listeners(tmp_path_factory.mktemp("rows"))
    yield started
    started.stop()


@pytest.mark.parametrize("held", [*Role, Credential.WORKER], ids=str)
def test_the_listener_for_clients(listeners: Listeners, held: Role | Credential) -> None:
    with listeners.open(listeners.clients, held) as channel:
        for method, needed in METHODS.items():
            if method not in CLIENT_METHODS and needed is not Credential.IDENTITY:
                expected = Answer.NO_METHOD
            elif not isinstance(held, Role):
                expected = Answer.UNKNOWN_CALLER
            elif isinstance(needed, Role) and held < needed:
                expected = Answer.NO_ROLE
            else:
                expected = Answer.PERMITTED
            assert answer(channel, method) is expected, method


@pytest.mark.parametrize("held", [*Role, Credential.WORKER], ids=str)
def test_the_listener_for_workers(listeners: Listeners, held: Role | Credential) -> None:
    own = Answer.PERMITTED if held is Credential.WORKER else Answer.UNKNOWN_CALLER
    with listeners.open(listeners.workers, held) as channel:
        for method in METHODS:
            expected = own if method in (CONNECT, RENEW) else Answer.NO_METHOD
            assert answer(channel, method) is expected, method


@pytest.mark.parametrize("held", CALLERS, ids=str)
def test_the_listener_for_enrolment(listeners: Listeners, held: Role | Credential | None) -> None:
    """It asks for no certificate, and an identity gives nothing there."""
    with listeners.open(listeners.ticket.address, held) as channel:
        for method in METHODS:
            expected = Answer.PERMITTED if method == JOIN else Answer.NO_METHOD
            assert answer(channel, method) is expected, method


def test_a_method_without_a_row_is_refused_on_every_listener(tmp_path: Path) -> None:
    rowless = (CONNECT, JOIN, "/leasehold.v1.FleetService/ListWorkers")
    lines = (f"del METHODS[{method!r}]" for method in rowless)
    prelude = "\n".join(["from leasehold_coordinator.access.methods import METHODS", *lines])
    started = Listeners(tmp_path, prelude)
    callers: list[tuple[str, Role | Credential | None]] = [
        (started.workers, Credential.WORKER),
        (started.ticket.address, None),
        (started.clients, Role.ADMIN),
    ]
    for method, (address, held) in zip(rowless, callers, strict=True):
        with started.open(address, held) as channel:
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            request = ConnectRequest(hello=make_hello()).SerializeToString() if method == CONNECT else b""
            with pytest.raises(grpc.RpcError) as error:
                next(call(request, timeout=20))
            assert cast("grpc.Call", error.value).code() is grpc.StatusCode.PERMISSION_DENIED
            reason, message = refusal(error.value)
            assert reason == "NOT_PERMITTED"
            assert f"may call {method}" in message
    for method in rowless:
        wanted = f"outcome = REFUSED AND method:{method.rpartition('/')[2]}"
        until(lambda: bool(refused_rows(started, wanted)))  # noqa: B023
    started.stop()


def refused_rows(started: Listeners, wanted: str) -> list[str]:
    """The methods of entries, as an admin sees them."""
    coordinator = started.coordinator
    coordinator.channel = started.open(started.clients, Role.ADMIN)
    with coordinator.channel:
        return [entry.method for entry in entries(coordinator, wanted)]
