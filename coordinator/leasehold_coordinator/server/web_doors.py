"""The logins of the web page: the token of clients, a token of OpenID Connect, or a client certificate.

A login becomes a caller, as a call with the same credential would. The page's calls for the login go through
gRPC's own listener, so each has the caller's role, bounds, view and audit. A revocation or a block ends them.
"""

import datetime
from typing import Final, final

import grpc
import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from leasehold_web.entries import Api, Entry, LoginRefusedError, open_api

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import parse_identity
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.api.authentication import Authentication, refuse
from leasehold_coordinator.api.token_authentication import TokenAuthentication
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_refusals import LOGIN, AuditRefusals

OPTIONS: Final = [
    # Each login has a connection of its own: one connection has a bounded number of calls.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class _KeptCaller(msgspec.Struct, frozen=True):
    """A caller in the file of sessions."""

    identity: str
    address: str
    is_local_admin: bool
    claimed_role: int
    serial: str
    expire_time: datetime.datetime | None
    token_digest: str


@final
class WebDoors:
    """The logins.

    Args:
        authentication: Knows the token of clients, and the certificates.
        audit: Told of refused logins.
        oidc: Knows the tokens of an OpenID Connect issuer. None: there is none.
        address: gRPC's own listener, which only this process's user can reach.
    """

    hint: str = (
        "Paste the content of client.token in the coordinator's state directory, or a token of the OpenID "
        "Connect issuer."
    )

    def __init__(
        self,
        authentication: Authentication,
        audit: AuditRefusals,
        oidc: TokenAuthentication | None,
        address: str,
    ) -> None:
        self._authentication = authentication
        self._audit = audit
        self._oidc = oidc
        self._address = address

    async def by_token(self, token: str, address: str) -> Entry:
        """The login with the token of clients, or of the issuer."""
        caller = self._authentication.web_token_holder(token, f"web:{address}")
        try:
            if caller is None and self._oidc is not None:
                caller = self._authentication.web_again(self._oidc.token_holder(token, f"web:{address}"))
            if caller is None:
                refuse("no login has this token: paste the content of client.token again")
        except FleetError as error:
            raise self._refused(error, address) from error
        return self._entry(caller)

    async def by_certificate(self, der: bytes, address: str) -> Entry:
        """The login with the client certificate of the connection."""
        pem = x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)
        try:
            return self._entry(self._authentication.web_certificate_holder(pem, f"web:{address}"))
        except FleetError as error:
            raise self._refused(error, address) from error

    def _refused(self, error: FleetError, address: str) -> LoginRefusedError:
        self._audit.note(error, LOGIN, f"web:{address}")
        return LoginRefusedError(error.message)

    async def again(self, kept: bytes) -> Entry:
        """The login of an earlier run, unless its credential is not valid any more."""
        try:
            found = msgspec.json.decode(kept, type=_KeptCaller)
            caller = Caller(
                parse_identity(found.identity),
                found.address,
                is_local_admin=found.is_local_admin,
                claimed_role=Role(found.claimed_role),
                serial=found.serial,
                expire_time=found.expire_time,
            )
            is_other_token = found.token_digest != self._authentication.client_token_digest
            if caller.is_local_admin and is_other_token:
                raise LoginRefusedError("the token of clients has changed: log in again")
            return self._entry(self._authentication.web_again(caller))
        except FleetError as error:
            raise LoginRefusedError(error.message) from error
        except ValueError as error:
            raise LoginRefusedError("the login can't be read: log in again") from error

    def _entry(self, caller: Caller) -> Entry:
        header, forget = self._authentication.web.add(caller)
        channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
        found = open_api(channel, (("authorization", header),))
        kept = _KeptCaller(
            str(caller.identity),
            caller.address,
            caller.is_local_admin,
            caller.claimed_role,
            caller.serial,
            caller.expire_time,
            self._authentication.client_token_digest,
        )

        async def api() -> Api:
            return found

        async def leave() -> None:
            try:
                await channel.close()  # first, so that no call has a login that is unknown
            finally:
                forget()

        # A refusal depends on these facts, so logins with the same credential are refused together.
        view = (
            caller.identity,
            caller.is_local_admin,
            caller.claimed_role,
            caller.serial,
            caller.expire_time,
        )
        return Entry(str(caller.identity), api, view, msgspec.json.encode(kept), leave)
