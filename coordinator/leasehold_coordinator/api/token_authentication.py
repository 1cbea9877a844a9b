"""The identity of a caller by a token of an OpenID Connect issuer."""

import hashlib
from typing import Any, Final, NoReturn, final

import grpc
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.bearer_tokens import (
    OidcSettings,
    TokenError,
    TokenUser,
    UnknownKeyError,
    verify,
)
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.key_source import KeySource
from leasehold_coordinator.access.local_tokens import bearer_token
from leasehold_coordinator.api.authentication import authorization, is_encrypted, refuse
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_refusals import AuditRefusals
from leasehold_coordinator.fleet.callers import host_of
from leasehold_coordinator.fleet.live_calls import LiveCalls

Context = grpc.aio.ServicerContext[Any, Any]

VERIFIED_LIMIT: Final = 1_024
"""Most tokens whose signature is not verified again."""


@final
class TokenAuthentication:
    """Establishes the callers of the listener for OpenID Connect.

    Args:
        settings: Which tokens are accepted.
        source: The keys of the issuer.
        calls: The calls under way.
        audit: Told of each token that is new.
    """

    def __init__(
        self, settings: OidcSettings, source: KeySource, calls: LiveCalls, audit: AuditRefusals
    ) -> None:
        self.calls = calls
        self._audit = audit
        self._settings = settings
        self._source = source
        self._verified: dict[bytes, TokenUser] = {}
        """Users of verified tokens, by SHA-256 of the token, oldest first."""
        self._keys = source.keys
        """The keys that verified them."""

    async def client(self, context: Context) -> Caller:
        """The caller, without the role of its bindings. ``calls`` refuse it if it is blocked or has expired.

        Raises:
            FleetError: UNAUTHENTICATED, or ISSUER_UNAVAILABLE.
        """
        if not is_encrypted(context):
            refuse("the connection is older than TLS 1.3: use TLS 1.3")
        headers = authorization(context)
        header = headers[0] if len(headers) == 1 else None
        token = bearer_token(header) if isinstance(header, str) else None
        if token is None:
            refuse(
                "the call has no token, or several: send a token of the OpenID Connect issuer as metadata "
                "`authorization: Bearer …`; `leasehold` takes it from the file LEASEHOLD_TOKEN_FILE"
            )
        return self.token_holder(token, host_of(context.peer()))

    def token_holder(self, token: str, address: str) -> Caller:
        """The user of a token, without the role of its bindings.

        Raises:
            FleetError: UNAUTHENTICATED, or ISSUER_UNAVAILABLE.
        """
        user, is_new = self._user(token)
        caller = Caller(
            user.identity,
            address,
            claimed_role=user.role,
            expire_time=user.expire_time,
        )
        if is_new:
            self._audit.note_login(caller)
        return caller

    def _user(self, token: str) -> tuple[TokenUser, bool]:
        """The user of a token, and whether the token is new.

        Raises:
            FleetError: As :meth:`client`.
        """
        if self._keys is not self._source.keys:
            self._keys = self._source.keys
            self._verified.clear()  # a removed key verifies no token any more
        digest = hashlib.sha256(token.encode()).digest()
        if (known := self._verified.get(digest)) is not None:
            return known, False
        try:
            user = verify(token, self._keys, self._settings)
        except UnknownKeyError as error:
            if self._source.ask() or not self._keys:
                raise FleetError(
                    errors_pb2.ERROR_REASON_ISSUER_UNAVAILABLE,
                    f"the keys of the OpenID Connect issuer {self._settings.issuer} are being read, or can't "
                    "be read: try again, or see the coordinator's log",
                ) from None
            _refuse_token(str(error))
        except TokenError as error:
            _refuse_token(str(error))
        self._verified[digest] = user
        if len(self._verified) > VERIFIED_LIMIT:
            del self._verified[next(iter(self._verified))]
        return user, True


def _refuse_token(why: str) -> NoReturn:
    refuse(f"the token is not valid ({why}): get another one from the OpenID Connect issuer")
