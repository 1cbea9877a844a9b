"""The identity of a caller."""

import hashlib
from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn, final

import grpc
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.local_tokens import (
    CLIENT_FILE,
    SCHEME,
    WORKER_FILE,
    LocalTokens,
    is_bearer,
)
from leasehold_coordinator.access.peer_certificates import parse_peer_certificate
from leasehold_coordinator.access.web_callers import WebCallers
from leasehold_coordinator.api.unix_users import UnixUsers
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import host_of
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.live_calls import LiveCalls

Context = grpc.aio.ServicerContext[Any, Any]

_TLS_1_3: Final = b"TLSv1.3"
_CLIENT_KINDS: Final = (Kind.USER, Kind.SERVICE)
_SOCKET_SCHEMES: Final = ("unix:", "unix-abstract:")


@final
class Authentication:
    """Establishes the callers.

    Args:
        tokens: The tokens of clients and workers.
        socket_user: The Unix user of a connection through the client socket, by its gRPC peer. None: the
            connection did not come through the socket.
        certificates: The client certificates.
        calls: The calls under way.
        is_insecure: Whether connections without TLS are permitted.
    """

    def __init__(
        self,
        tokens: LocalTokens,
        socket_user: Callable[[str], int | None],
        certificates: ClientCertificates,
        calls: LiveCalls,
        *,
        is_insecure: bool = False,
    ) -> None:
        self.calls = calls
        self.certificates = certificates
        self._is_insecure = is_insecure
        self._tokens = tokens
        self._socket_user = socket_user
        self._users = UnixUsers()
        self.web = WebCallers()

    async def client(self, context: Context) -> Caller:
        """The caller, without a role.

        Raises:
            FleetError: UNAUTHENTICATED.
        """
        headers = authorization(context)
        if context.peer().startswith(_SOCKET_SCHEMES):
            if (caller := self._web_caller(context, headers)) is not None:
                return self._admitted(caller)
            if headers:
                refuse("the call has a token besides its connection's user: send no token through the socket")
            uid = self._socket_user(context.peer())
            if uid is None:
                refuse("the connection did not come through the client socket: use its path")
            identity, is_admin = await self._users.identity(uid), self._users.is_admin(uid)
            return self._admitted(Caller(identity, host_of(context.peer()), is_local_admin=is_admin))
        self._require_encryption(context)
        if (pem := _certificate(context)) is not None:
            return self._certificate_holder(context, pem, _CLIENT_KINDS)
        if not _is_only(headers, self._tokens.client):
            refuse(_UNKNOWN.format(kind="call", file=CLIENT_FILE))
        return self._token_holder(host_of(context.peer()))

    def _token_holder(self, address: str) -> Caller:
        return Caller(self._users.own, address, is_local_admin=True)

    def _web_caller(self, context: Context, headers: list[str | bytes]) -> Caller | None:
        """The caller of this process's web page, which connects to the inner listener without the socket."""
        is_forwarded = self._socket_user(context.peer()) is not None
        if is_forwarded or len(headers) != 1 or not isinstance(headers[0], str):
            return None
        return self.web.find(headers[0])

    def web_token_holder(self, token: str, address: str) -> Caller | None:
        """The caller who logs in to the web page with a token. None: it is not the token of clients."""
        return self._token_holder(address) if is_bearer(SCHEME + token, self._tokens.client) else None

    def web_certificate_holder(self, pem: bytes, address: str) -> Caller:
        """The caller who logs in to the web page with a client certificate. TLS has verified the certificate.

        Raises:
            FleetError: UNAUTHENTICATED.
        """
        return self._holder(pem, address, _CLIENT_KINDS)

    def web_again(self, caller: Caller) -> Caller:
        """The caller who logged in to the web page of an earlier run of the coordinator.

        Raises:
            FleetError: UNAUTHENTICATED, the credential is not valid any more.
        """
        return self._admitted(caller)

    @property
    def client_token_digest(self) -> str:
        """The SHA-256 of the token of clients. A login with another token is not valid any more."""
        return hashlib.sha256(self._tokens.client.encode()).hexdigest()

    def worker(self, context: Context) -> Caller | None:
        """The worker that calls. None: the holder of the token of workers, which may use any worker's name.

        Raises:
            FleetError: UNAUTHENTICATED.
        """
        self._require_encryption(context)
        if (pem := _certificate(context)) is not None:
            return self._certificate_holder(context, pem, (Kind.WORKER,))
        if not _is_only(authorization(context), self._tokens.worker):
            refuse(_UNKNOWN.format(kind="worker", file=WORKER_FILE))
        return None

    def token_worker(self, context: Context, name: str) -> Caller:
        """The worker that a holder of the token of workers names in its hello.

        Raises:
            FleetError: UNAUTHENTICATED, the name is blocked.
        """
        return self._admitted(Caller(Identity(Kind.WORKER, name), host_of(context.peer())))

    def _certificate_holder(self, context: Context, pem: bytes, kinds: Collection[Kind]) -> Caller:
        """The holder of the certificate that a connection presents.

        Raises:
            FleetError: UNAUTHENTICATED.
        """
        if authorization(context):
            refuse("the call has a token besides its connection's certificate: send only one credential")
        return self._holder(pem, host_of(context.peer()), kinds)

    def _holder(self, pem: bytes, address: str, kinds: Collection[Kind]) -> Caller:
        """The holder of a certificate that a connection presented.

        Raises:
            FleetError: UNAUTHENTICATED.
        """
        try:
            found = parse_peer_certificate(pem, self.certificates.trust_domain)
        except ValueError as error:
            refuse(str(error))
        if found.identity.kind not in kinds:
            expected = " or ".join(f"{kind}/NAME" for kind in kinds)
            refuse(f"the certificate is of {found.identity}, and this address is for {expected}")
        known = self.certificates.find(pem, found)
        if known is None and not self.certificates.is_external:
            refuse(
                f"the coordinator's store does not know certificate {found.serial} of {found.identity}: ask "
                "an admin for a join token"
            )
        caller = self._admitted(
            Caller(found.identity, address, serial=found.serial, expire_time=found.not_after)
        )
        if known is not None:  # it came together with the certificates of all CAs
            self.certificates.confirm(known.identity, {known.authority})
        return caller

    def _admitted(self, caller: Caller) -> Caller:
        refusal = self.certificates.refusal(caller)
        if refusal is not None:
            raise refusal
        return caller

    def _require_encryption(self, context: Context) -> None:
        if not self._is_insecure:
            require_tls(context)


_UNKNOWN: Final = (
    "the {kind} has no valid token: send the content of {file} in the coordinator's state directory as "
    "metadata `authorization: Bearer …`; `leasehold` takes it from the directory LEASEHOLD_CREDENTIALS"
)


def refuse(message: str) -> NoReturn:
    """Refuses a caller without an identity.

    Raises:
        FleetError: UNAUTHENTICATED.
    """
    raise FleetError(errors_pb2.ERROR_REASON_UNAUTHENTICATED, message)


def _certificate(context: Context) -> bytes | None:
    """The certificate that the connection presents, as PEM. None: its listener requires none."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def require_tls(context: Context) -> None:
    """Refuses a connection without TLS 1.3.

    Raises:
        FleetError: UNAUTHENTICATED.
    """
    if not is_encrypted(context):
        refuse("the connection is older than TLS 1.3: use TLS 1.3")


def is_encrypted(context: Context) -> bool:
    """Whether a connection has TLS 1.3."""
    return _TLS_1_3 in context.auth_context().get("ssl_tls_version", ())


def authorization(context: Context) -> list[str | bytes]:
    """The ``authorization`` headers of a call."""
    return [value for key, value in context.invocation_metadata() or () if key == "authorization"]


def _is_only(headers: list[str | bytes], token: str) -> bool:
    """Whether a token is the only credential in headers."""
    return len(headers) == 1 and isinstance(headers[0], str) and is_bearer(headers[0], token)
