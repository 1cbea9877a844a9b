"""The caller of a call, as its credential proves it."""

import datetime
from dataclasses import dataclass

from leasehold_coordinator.access.identities import Identity
from leasehold_coordinator.access.roles import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and how long the credential is valid.

    Attributes:
        identity: The proven identity.
        address: The host of the peer, as gRPC writes it without the port.
        is_local_admin: Whether the kernel or ``client.token`` proves root or the coordinator's Unix user, who
            could edit the store.
        on_behalf_of: The user for whom a service acts. None: the caller acts for itself.
        claimed_role: The role that a token of an OpenID Connect issuer claims.
        role: What the caller may do.
        serial: The serial number of the client certificate, in hexadecimal. Empty: another credential.
        expire_time: When the credential expires. None: never.
    """

    identity: Identity
    address: str
    is_local_admin: bool = False
    on_behalf_of: Identity | None = None
    claimed_role: Role = Role.NONE
    role: Role = Role.NONE
    serial: str = ""
    expire_time: datetime.datetime | None = None

    @property
    def owner(self) -> Identity:
        """The identity whose workloads the caller may change, and which owns new ones."""
        return self.on_behalf_of or self.identity

    @property
    def sees_all(self) -> bool:
        """Whether the caller sees everything of the workloads of all users, and may act on them."""
        return self.role >= Role.OPERATOR

    def __str__(self) -> str:
        return str(self.identity) if self.on_behalf_of is None else f"{self.identity} for {self.on_behalf_of}"
