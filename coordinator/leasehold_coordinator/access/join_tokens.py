"""The join tokens: permissions to get a first certificate. Pure.

A token has a secret of 256 random bits. The coordinator keeps the secret's SHA-256 only, and finds a token by
the SHA-256, so the time of a lookup says nothing about a secret.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, final

from leasehold.v1.enrolment_service_pb2 import JoinTicket, JoinToken

from leasehold_coordinator.access.identities import NAME, NAME_RULE, Identity, Kind

SECRET_BYTES: Final = 32
TICKET_PREFIX: Final = "leasehold-join-"
JOINING_KINDS: Final = (Kind.WORKER, Kind.USER, Kind.SERVICE)
"""Kinds that certificates carry. No token permits the identity of a Unix user."""

_PATTERN: Final = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._@*?-]{0,63}")


@dataclass(frozen=True, slots=True)
class Join:
    """The join of one key.

    Attributes:
        identity: Who joined.
        requests: Digests of the certificate requests that got the certificate, each of which got it once.
    """

    identity: str
    requests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StoredJoinToken:
    """A join token.

    Attributes:
        token: What clients see of the token.
        secret_digest: SHA-256 of the secret.
        joins: The joins, by SHA-256 of their public keys.
    """

    token: JoinToken
    secret_digest: bytes
    joins: Mapping[bytes, Join] = field(default_factory=dict)

    def permits(self, identity: Identity) -> bool:
        """Whether the identity may join by the token."""
        return identity.kind in JOINING_KINDS and identity.matches(self.token.identity)

    def has_expired(self, now_ns: int) -> bool:
        """Whether the token is refused at a time, in nanoseconds of the Unix epoch."""
        return self.token.expire_time.ToNanoseconds() <= now_ns

    def used(self, key_digest: bytes, identity: Identity, request: bytes) -> "StoredJoinToken":
        """The token after a join by a request with this digest."""
        token = JoinToken()
        token.CopyFrom(self.token)
        token.uses_left -= 1
        return replace(self, token=token, joins={**self.joins, key_digest: Join(str(identity), (request,))})

    def repeated(self, key_digest: bytes, request: bytes) -> "StoredJoinToken":
        """The token after a further request of a key that has joined."""
        join = self.joins[key_digest]
        return replace(
            self, joins={**self.joins, key_digest: replace(join, requests=(*join.requests, request))}
        )


@final
class JoinTokens:
    """The stored join tokens."""

    def __init__(self) -> None:
        self._by_id: dict[str, StoredJoinToken] = {}
        self._by_digest: dict[bytes, StoredJoinToken] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[StoredJoinToken]:
        """Every token, by id."""
        return iter(sorted(self._by_id.values(), key=lambda stored: stored.token.join_token_id))

    def put(self, stored: StoredJoinToken) -> None:
        """Adds or replaces a token."""
        self._by_id[stored.token.join_token_id] = stored
        self._by_digest[stored.secret_digest] = stored

    def remove(self, join_token_id: str) -> StoredJoinToken | None:
        """Removes a token. None: there is none with this id."""
        stored = self._by_id.pop(join_token_id, None)
        if stored is not None:
            del self._by_digest[stored.secret_digest]
        return stored

    def get(self, join_token_id: str) -> StoredJoinToken | None:
        """The token with this id."""
        return self._by_id.get(join_token_id)

    def find(self, secret: bytes) -> StoredJoinToken | None:
        """The token with this secret."""
        return self._by_digest.get(secret_digest(secret))


def secret_digest(secret: bytes) -> bytes:
    """SHA-256 of a secret."""
    return hashlib.sha256(secret).digest()


def check_pattern(text: str) -> bool:
    """Checks the identity or pattern of a token.

    Returns:
        Whether the text is a pattern, which several identities may match.

    Raises:
        ValueError: The text is neither. The message has the rule.
    """
    kind, _, name = text.partition("/")
    if kind not in JOINING_KINDS:
        kinds = ", ".join(f"{one}/NAME" for one in JOINING_KINDS)
        raise ValueError(f"{text[:100]!r} is no identity that may join: write one of {kinds}")
    if NAME.fullmatch(name):
        return False
    if not _PATTERN.fullmatch(name) or not set(name) & set("*?"):
        raise ValueError(
            f"{name[:100]!r} is no name of an identity: a name has {NAME_RULE}; a pattern may also have '*' "
            "and '?'"
        )
    return True


def ticket_text(ticket: JoinTicket) -> str:
    """A ticket as one word, which :class:`JoinTicket` describes."""
    data = ticket.SerializeToString()
    return TICKET_PREFIX + base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")
