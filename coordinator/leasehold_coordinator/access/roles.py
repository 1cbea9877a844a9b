"""The roles of clients, and the credentials of other callers."""

from enum import Enum, IntEnum, unique


@unique
class Role(IntEnum):
    """A role by its strength. Each role includes the weaker ones. Numbers as in ``leasehold.v1.Role``."""

    NONE = 0
    """No role: the caller only learns who it is."""
    VIEWER = 1
    USER = 2
    OPERATOR = 3
    ADMIN = 4


@unique
class Credential(Enum):
    """The credential that a method requires of its caller, where no role of clients decides."""

    IDENTITY = "identity"
    """Any identity, of a client or a worker. No role is needed."""
    WORKER = "worker"
    """A worker's certificate, or the token of workers. This is the role ``worker`` of docs/security.md."""
    JOIN_TOKEN = "join token"  # noqa: S105 - the name of the credential
    """A join token. The caller has no identity yet."""
    HOST_USER = "user of a worker's host"
    """A Unix user at the socket of a worker. No listener of the coordinator has these methods."""
