"""The caller of a call, as its credential proves it."""

import datetime
from dataclasses import dataclass

from leasehold_coordinator.access.identities import Identity


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and how long the credential is valid.

    Attributes:
        identity: The proven identity.
        address: The host of the peer, as gRPC writes it without the port.
        is_local_admin: Whether the kernel or ``client.token`` proves root or the coordinator's Unix user, who
            could edit the store.
        on_behalf_of: The user for whom a service acts. None: the caller acts for itself.
        serial: The serial number of the client certificate, in hexadecimal. Empty: another credential.
        expire_time: When the credential expires. None: never.
    """

    identity: Identity
    address: str
    is_local_admin: bool = False
    on_behalf_of: Identity | None = None
    serial: str = ""
    expire_time: datetime.datetime | None = None

    @property
    def owner(self) -> Identity:
        """The identity whose workloads the caller may change, and which owns new ones."""
        return self.on_behalf_of or self.identity
