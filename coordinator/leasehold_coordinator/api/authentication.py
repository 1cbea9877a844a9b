"""The identity of a caller."""

from collections.abc import Callable
from typing import Any, Final, NoReturn, final

import grpc
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.local_tokens import CLIENT_FILE, WORKER_FILE, LocalTokens, is_bearer
from leasehold_coordinator.api.unix_users import UnixUsers
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import host_of

Context = grpc.aio.ServicerContext[Any, Any]

_TLS_1_3: Final = b"TLSv1.3"
_SOCKET_SCHEMES: Final = ("unix:", "unix-abstract:")


@final
class Authentication:
    """Establishes the callers.

    Args:
        tokens: The tokens of clients and workers.
        socket_user: The Unix user of a connection through the client socket, by its gRPC peer. None: the
            connection did not come through the socket.
        is_insecure: Whether connections without TLS are permitted.
    """

    def __init__(
        self, tokens: LocalTokens, socket_user: Callable[[str], int | None], *, is_insecure: bool = False
    ) -> None:
        self._is_insecure = is_insecure
        self._tokens = tokens
        self._socket_user = socket_user
        self._users = UnixUsers()

    async def client(self, context: Context) -> Caller:
        """The caller, without a role.

        Raises:
            FleetError: UNAUTHENTICATED.
        """
        headers = authorization(context)
        if context.peer().startswith(_SOCKET_SCHEMES):
            if headers:
                refuse("the call has a token besides its connection's user: send no token through the socket")
            uid = self._socket_user(context.peer())
            if uid is None:
                refuse("the connection did not come through the client socket: use its path")
            identity, is_admin = await self._users.identity(uid), self._users.is_admin(uid)
            return Caller(identity, host_of(context.peer()), is_local_admin=is_admin)
        self._require_encryption(context)
        if not _is_only(headers, self._tokens.client):
            refuse(_UNKNOWN.format(kind="call", file=CLIENT_FILE))
        return Caller(self._users.own, host_of(context.peer()), is_local_admin=True)

    def require_worker(self, context: Context) -> None:
        """Refuses a call without the token of workers.

        Raises:
            FleetError: UNAUTHENTICATED.
        """
        self._require_encryption(context)
        if not _is_only(authorization(context), self._tokens.worker):
            refuse(_UNKNOWN.format(kind="worker", file=WORKER_FILE))

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
