"""Channels to coordinators with this user's credentials, and servers that have them."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from leasehold_client.config import INSECURE_SCHEME, UNIX_SCHEME, credentials_directory
from leasehold_client.coordinator import channels
from leasehold_coordinator.access.authority import LOOPBACK_NAMES
from leasehold_coordinator.access.certificates import CertificateRegistry
from leasehold_coordinator.access.local_tokens import CLIENT_FILE, WORKER_FILE
from leasehold_coordinator.api.authentication import Authentication
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.live_calls import LiveCalls
from leasehold_coordinator.server.transport import ServerTls, open_state
from leasehold_coordinator.storage.store import Store

Options = Sequence[tuple[str, int]]


def credentials(token_file: str = CLIENT_FILE) -> grpc.ChannelCredentials:
    """Credentials with the token in a file, which a coordinator would create at its first start."""
    directory = credentials_directory()
    open_state(directory)
    return grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials((directory / "ca.pem").read_bytes()),
        grpc.access_token_call_credentials(token(token_file)),
    )


def token(token_file: str) -> str:
    """The token in a file."""
    return (credentials_directory() / token_file).read_text().strip()


def open_channel(address: str, options: Options = ()) -> grpc.Channel:
    """A client's channel."""
    if address.startswith(INSECURE_SCHEME):
        return channels.open_channel(address, options)
    return grpc.secure_channel(address, credentials(), options=options)


def open_worker_channel(address: str, options: Options = ()) -> grpc.Channel:
    """A worker's channel."""
    return grpc.secure_channel(address, credentials(WORKER_FILE), options=options)


def open_aio_channel(address: str, options: Options = ()) -> grpc.aio.Channel:
    """A client's channel, for asyncio."""
    if address.startswith(UNIX_SCHEME):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials(), options=options)


def open_aio_worker_channel(address: str, options: Options = ()) -> grpc.aio.Channel:
    """A worker's channel, for asyncio."""
    if address.startswith(INSECURE_SCHEME):
        target = address.removeprefix(INSECURE_SCHEME)
        return grpc.aio.insecure_channel(target, options=options, interceptors=[_SessionToken()])
    return grpc.aio.secure_channel(address, credentials(WORKER_FILE), options=options)


class _SessionToken(grpc.aio.StreamStreamClientInterceptor):
    """Adds the token of workers to sessions. gRPC's own call credentials need TLS."""

    def __init__(self) -> None:
        self._header = ("authorization", f"Bearer {token(WORKER_FILE)}")

    async def intercept_stream_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        old = client_call_details
        metadata = grpc.aio.Metadata(*(old.metadata or ()), self._header)
        new = grpc.aio.ClientCallDetails(
            old.method, old.timeout, metadata, old.credentials, old.wait_for_ready
        )
        return await continuation(new, request_iterator)


def server_credentials() -> grpc.ServerCredentials:
    """Credentials of a coordinator."""
    authority, _ = open_state(credentials_directory())
    return ServerTls(authority, frozenset(LOOPBACK_NAMES)).credentials()


def authentication(store: Store) -> Authentication:
    """A coordinator's authentication, without a client socket."""
    authority, tokens = open_state(credentials_directory())
    certificates = ClientCertificates(store, authority, CertificateRegistry())
    return Authentication(tokens, lambda peer: None, certificates, LiveCalls(certificates.refusal))
