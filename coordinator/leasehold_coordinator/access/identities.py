"""Identities of callers: a kind and a name, such as ``user/alice``.

In certificates, an identity is the URI ``leasehold://TRUST_DOMAIN/KIND/NAME``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, unique
from fnmatch import fnmatchcase
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
NAME_RULE: Final = "1 to 64 letters, digits, '-', '_', '.' or '@', and a letter or digit first"
SCHEME: Final = "leasehold"


@unique
class Kind(StrEnum):
    """The namespaces of identities. Equal names of two kinds are two identities."""

    LOCAL = "local"
    """A Unix user of the coordinator's host."""
    USER = "user"
    SERVICE = "service"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Identity:
    """The proven identity of a caller, or the owner of an object.

    Attributes:
        kind: The namespace.
        name: The name, which is compared byte by byte.
    """

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    def uri(self, trust_domain: str) -> str:
        """The URI of the identity in a certificate."""
        return f"{SCHEME}://{trust_domain}/{self}"

    def matches(self, pattern: str) -> bool:
        """Whether a pattern such as ``worker/gpu-*`` covers the identity. ``*`` covers no slash."""
        kind, _, name = pattern.partition("/")
        return kind == self.kind and "/" not in name and fnmatchcase(self.name, name)


def parse_identity(text: str, kinds: Iterable[Kind] = tuple(Kind)) -> Identity:
    """Reads ``KIND/NAME``.

    Args:
        text: The text.
        kinds: The kinds that a refusal suggests. An identity of another kind is read too.

    Raises:
        ValueError: The text is no identity. The message names the rule.
    """
    kind, slash, name = text.partition("/")
    if not slash or kind not in tuple(Kind):
        forms = ", ".join(f"{one}/NAME" for one in kinds)
        raise ValueError(f"{text[:100]!r} is no identity: write one of {forms}")
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:100]!r} is no name of an identity: a name has {NAME_RULE}")
    return Identity(Kind(kind), name)


def parse_uri(uri: str, trust_domain: str) -> Identity:
    """Reads the URI of a certificate.

    Raises:
        ValueError: The URI is no identity of the trust domain. The message has the expected form.
    """
    prefix = f"{SCHEME}://{trust_domain}/"
    try:
        if not uri.startswith(prefix):
            raise ValueError("it is not of this trust domain")
        identity = parse_identity(uri.removeprefix(prefix))
        if identity.kind is Kind.LOCAL:
            raise ValueError("no certificate carries the identity of a Unix user")
    except ValueError as error:
        raise ValueError(
            f"{uri[:200]!r} is no identity ({error}): expected {prefix}worker/NAME, {prefix}user/NAME or "
            f"{prefix}service/NAME"
        ) from error
    return identity
