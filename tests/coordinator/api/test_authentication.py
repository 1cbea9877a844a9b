"""Nothing answers without an identity, and each listener answers its own callers only."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold_client.config import credentials_directory
from leasehold_client.coordinator.client import Client
from leasehold_coordinator.access.authority import LOOPBACK_NAMES
from leasehold_coordinator.access.methods import METHODS
from leasehold_coordinator.access.roles import Credential
from leasehold_coordinator.commands.enrolment import RENEW
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.server.transport import ServerTls, open_state
from leasehold_coordinator.storage.store import Store

from tests.channels import authentication, open_channel, open_worker_channel, token
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.unix_users import ANN, channel_as, identity, needs_root

CONNECT = "/leasehold.worker.v1.SessionService/Connect"


def channel_with(address: str, *authorization: str) -> grpc.Channel:
    """A channel that verifies the server, and sends these headers instead of a token."""
    certificate = (credentials_directory() / "ca.pem").read_bytes()

    def plugin(_: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback(tuple(("authorization", text) for text in authorization), None)

    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(certificate),
        grpc.metadata_call_credentials(cast("grpc.AuthMetadataPlugin", plugin)),
    )
    return grpc.secure_channel(address, credentials, options=[("grpc.use_local_subchannel_pool", 1)])


def ending(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The status and reason of a call that is refused."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    refused = cast("grpc.Call", error.value)
    status = rpc_status.from_call(refused)
    info = error_details_pb2.ErrorInfo()
    if status is not None:
        status.details[0].Unpack(info)
    return refused.code(), info.reason


class Recorder(grpc.GenericRpcHandler):
    """Notes each call with its headers, and has no method."""

    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """Notes a call."""
        self._calls.append(handler_call_details)


UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, "")
OF_OTHER_LISTENERS = {Credential.WORKER, Credential.JOIN_TOKEN, Credential.HOST_USER}


@pytest.mark.parametrize(
    "headers",
    [
        (),
        pytest.param(("Bearer ",), marks=pytest.mark.long),
        pytest.param(("Bearer wrong",), marks=pytest.mark.long),
        ("Basic wrong", "Bearer wrong"),
    ],
)
def test_without_the_token_no_method_answers(
    coordinator: CoordinatorProcess, headers: tuple[str, ...]
) -> None:
    with channel_with(coordinator.address, *headers) as channel:
        for method, needed in METHODS.items():
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            expected = UNIMPLEMENTED if needed in OF_OTHER_LISTENERS else UNAUTHENTICATED
            assert ending(lambda: next(call(b"", timeout=20))) == expected, method  # noqa: B023


def test_a_call_has_one_credential(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    good = f"Bearer {token('client.token')}"
    for headers in ((good, "Bearer wrong"), ("Bearer wrong", good), (good, good)):
        with channel_with(coordinator.address, *headers) as channel:
            stub = FleetServiceStub(channel)
            assert ending(lambda: stub.ListWorkers(ListWorkersRequest())) == UNAUTHENTICATED  # noqa: B023
    with grpc.insecure_channel(f"unix:{coordinator.folder}/store.sock") as channel:
        stub = FleetServiceStub(channel)
        assert stub.ListWorkers(ListWorkersRequest()).workers
        metadata = (("authorization", good),)
        assert ending(lambda: stub.ListWorkers(ListWorkersRequest(), metadata=metadata)) == UNAUTHENTICATED


def test_the_scheme_of_the_token_is_of_any_case(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    """As RFC 9110 says in section 11.1."""
    for scheme in ("bearer", "BEARER"):
        with channel_with(coordinator.address, f"{scheme} {token('client.token')}") as channel:
            assert FleetServiceStub(channel).ListWorkers(ListWorkersRequest()).workers


@pytest.mark.parametrize("version", ["TLSv1.2", None])
def test_a_connection_below_tls_1_3_is_refused(version: str | None, tmp_path: Path) -> None:
    """If gRPC has been imported before the coordinator could set the cipher suites."""

    class Context:
        def peer(self) -> str:
            return "ipv4:10.0.0.1:1"

        def auth_context(self) -> dict[str, list[bytes]]:
            return {"ssl_tls_version": [version.encode()]} if version else {}

        def invocation_metadata(self) -> list[tuple[str, str]]:
            return [("authorization", f"Bearer {token('client.token')}")]

    context = cast("grpc.aio.ServicerContext[object, object]", Context())
    store = Store.open(str(tmp_path / "store.sqlite3"))
    try:
        with pytest.raises(FleetError, match=r"use TLS 1\.3"):
            asyncio.run(authentication(store).client(context))
    finally:
        store.close()


def test_the_token_of_workers_is_none_of_clients(coordinator: CoordinatorProcess) -> None:
    with channel_with(coordinator.address, f"Bearer {token('worker.token')}") as channel:
        assert ending(lambda: FleetServiceStub(channel).ListWorkers(ListWorkersRequest())) == UNAUTHENTICATED


@pytest.mark.parametrize("name", ["client.token", None])
def test_without_the_token_of_workers_no_session_begins(
    coordinator: CoordinatorProcess, name: str | None
) -> None:
    headers = [f"Bearer {token(name)}"] if name else []
    with channel_with(coordinator.worker_address, *headers) as channel:
        connect: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONNECT)
        hello = ConnectRequest(hello=make_hello()).SerializeToString()
        assert ending(lambda: next(connect(iter([hello]), timeout=20))) == UNAUTHENTICATED
    assert not coordinator.fleet.ListWorkers(ListWorkersRequest()).workers


def test_each_listener_has_the_services_of_its_callers(coordinator: CoordinatorProcess) -> None:
    with open_worker_channel(coordinator.worker_address) as channel:
        for method in METHODS.keys() - {CONNECT, RENEW}:
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            assert ending(lambda: next(call(b"", timeout=20))) == UNIMPLEMENTED, method  # noqa: B023
    with open_channel(coordinator.address) as channel:
        connect: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONNECT)
        assert ending(lambda: next(connect(iter([b""]), timeout=20))) == UNIMPLEMENTED


def test_nothing_answers_in_clear(coordinator: CoordinatorProcess) -> None:
    for address in (coordinator.address, coordinator.worker_address):
        with grpc.insecure_channel(address) as channel:
            stub = FleetServiceStub(channel)
            assert ending(lambda: stub.ListWorkers(ListWorkersRequest(), timeout=20)) == (  # noqa: B023
                grpc.StatusCode.UNAVAILABLE,
                "",
            )


@pytest.mark.long
@pytest.mark.usefixtures("executed")
def test_no_handshake_below_tls_1_3_succeeds(coordinator: CoordinatorProcess) -> None:
    context = ssl.create_default_context(cafile=str(credentials_directory() / "ca.pem"))
    context.set_alpn_protocols(["h2"])
    for address in (coordinator.address, coordinator.worker_address):
        host, _, port = address.rpartition(":")
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as stream:
            assert stream.version() == "TLSv1.3"
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        plain = socket.create_connection((host, int(port)))
        with plain, pytest.raises(OSError, match=r"EOF|reset|handshake"):
            context.wrap_socket(plain, server_hostname=host)


def test_an_impostor_on_the_port_never_gets_the_token(tmp_path: Path) -> None:
    """Another user may listen on the port while the coordinator is down."""
    calls: list[object] = []
    authority, _ = open_state(tmp_path / "other")
    impostor = grpc.server(ThreadPoolExecutor(1), handlers=[Recorder(calls)])
    tls = ServerTls(authority, frozenset(LOOPBACK_NAMES))
    port = impostor.add_secure_port("127.0.0.1:0", tls.credentials())
    impostor.start()
    try:
        with open_channel(f"127.0.0.1:{port}") as channel:
            stub = FleetServiceStub(channel)
            code, _ = ending(lambda: stub.ListWorkers(ListWorkersRequest(), timeout=20))
    finally:
        impostor.stop(None)
    assert (code, calls) == (grpc.StatusCode.UNAVAILABLE, [])


def test_the_socket_needs_no_token(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    path = coordinator.folder / "store.sock"
    assert path.stat().st_mode & 0o777 == 0o666
    with Client(f"unix:{path}") as client:
        assert [found.name for found in client.workers()] == ["alpha"]


@needs_root
def test_the_kernel_tells_who_calls_through_the_socket(coordinator: CoordinatorProcess) -> None:
    with (
        channel_as(coordinator.folder / "store.sock", ANN) as channel,
        pytest.raises(grpc.RpcError, match=f"{identity(ANN)} has no role: ask an admin for") as error,
    ):
        FleetServiceStub(channel).ListWorkers(ListWorkersRequest(), timeout=20)
    assert cast("grpc.Call", error.value).code() == grpc.StatusCode.PERMISSION_DENIED
