"""Tokens of an OpenID Connect issuer (JWT, RFC 7519): their checks, and the user that they name."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import jwt
import msgspec

from leasehold_coordinator.access.identities import NAME, NAME_RULE, Identity, Kind
from leasehold_coordinator.access.json_web_keys import SigningKey
from leasehold_coordinator.access.roles import Role

LEEWAY: Final = datetime.timedelta(seconds=60)
"""How much the clocks of issuer and coordinator may differ."""

TOKEN_LIMIT_BYTES: Final = 8_192
_REQUIRED: Final = ["iss", "aud", "exp", "iat"]
_LATEST: Final = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)


class OidcSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokens are accepted, and what they say. Its fields are the keys of the table ``oidc``."""

    issuer: str
    """The ``iss`` of each token, byte by byte."""
    audience: str
    """One of the ``aud`` of each token. A token for another service is refused."""
    jwks_url: str = ""
    """URL of the issuer's keys, with https unless it is on loopback."""
    jwks_file: str = ""
    """File with the issuer's keys, instead of a URL."""
    name_claim: str = "sub"
    """The claim with the user's name."""
    prefix: str = "oidc-"
    """Beginning of all names of users, so that no token names a user of a certificate. It may be empty."""
    role_claim: str = ""
    """The claim with a text or a list of texts that ``roles`` maps. Empty: none."""
    roles: dict[str, str] = {}
    """Role by text of the claim: viewer, user, operator or admin."""


@dataclass(frozen=True, slots=True)
class TokenUser:
    """The user of a valid token.

    Attributes:
        identity: The user.
        role: The strongest role of the claim.
        expire_time: When the token is no longer accepted.
    """

    identity: Identity
    role: Role
    expire_time: datetime.datetime


class TokenError(Exception):
    """A token is refused. The text says why, and never quotes the token."""


class UnknownKeyError(TokenError):
    """The token names a key that is not known yet, or does not exist."""


def verify(token: str, keys: Mapping[str, SigningKey], settings: OidcSettings) -> TokenUser:
    """Checks a token, and returns its user.

    Raises:
        UnknownKeyError: Its key is not among the keys.
        TokenError: It is malformed, forged, expired, or meant for another service.
    """
    if len(token) > TOKEN_LIMIT_BYTES:
        raise TokenError(f"it has {len(token)} bytes, of at most {TOKEN_LIMIT_BYTES}")
    try:
        header = _header(token)
        if "crit" in header:
            raise TokenError("its header has critical extensions, and none is supported")
        key_id, algorithm = header.get("kid", ""), header.get("alg")
        if not isinstance(key_id, str) or key_id not in keys:
            raise UnknownKeyError(f"the issuer has no key {str(key_id)[:100]!r}")
        key = keys[key_id]
        if algorithm != key.algorithm:
            raise TokenError(
                f"its algorithm is {str(algorithm)[:20]!r}, and its key is for {key.algorithm} only"
            )
        claims = jwt.decode(
            token,
            key.key,
            algorithms=[key.algorithm],
            issuer=settings.issuer,
            audience=settings.audience,
            leeway=LEEWAY,
            options={"require": _REQUIRED},
        )
        expire_time = datetime.datetime.fromtimestamp(int(claims["exp"]), datetime.UTC) + LEEWAY
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TokenError(str(error)[:200] or type(error).__name__) from None
    return TokenUser(_identity(claims, settings), _role(claims, settings), min(expire_time, _LATEST))


def _header(token: str) -> Mapping[str, object]:
    try:
        return jwt.get_unverified_header(token)
    except jwt.DecodeError:
        raise TokenError("it is neither a JSON Web Token nor the whole text of client.token") from None


def _identity(claims: Mapping[str, object], settings: OidcSettings) -> Identity:
    name = claims.get(settings.name_claim)
    if not isinstance(name, str) or not NAME.fullmatch(settings.prefix + name):
        raise TokenError(
            f"its claim {settings.name_claim!r} with the prefix {settings.prefix!r} is {str(name)[:100]!r}, "
            f"which is no name of a user: a name has {NAME_RULE}"
        )
    if settings.name_claim == "email" and claims.get("email_verified", True) is not True:
        raise TokenError("its issuer has not verified the email address, so anybody could have entered it")
    return Identity(Kind.USER, settings.prefix + name)


def _role(claims: Mapping[str, object], settings: OidcSettings) -> Role:
    """The strongest role of the claim, or NONE."""
    found = claims.get(settings.role_claim, [])
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list):
        raise TokenError(f"its claim {settings.role_claim!r} is neither a text nor a list")
    roles = (settings.roles[text] for text in texts if isinstance(text, str) and text in settings.roles)
    return max((Role[role.upper()] for role in roles), default=Role.NONE)
