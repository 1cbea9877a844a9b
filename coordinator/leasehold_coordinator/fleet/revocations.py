"""Revokes client certificates, and blocks identities: in memory first, then in the store.

A revocation is effective even if the store can't be written. Calls of the revoked caller end with the next
check of :class:`~leasehold_coordinator.fleet.live_calls.LiveCalls`.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.certificates import Revocation
from leasehold_coordinator.access.identities import Identity
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import change_rows
from leasehold_coordinator.fleet.callers import caller
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import Gone, revocation_row
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.storage.write_health import look_at

logger = logging.getLogger(__name__)

_SERIAL: Final = re.compile(r"[1-9a-f][0-9a-f]{0,39}")
"""A serial number, which has at most 20 bytes (RFC 5280)."""

BLOCK_LIMIT: Final = 10_000
"""Most blocked identities. A list of them fits into one response."""


@final
class Revocations:
    """Revokes and blocks.

    Args:
        store: The store.
        certificates: The client certificates.
    """

    def __init__(self, store: Store, certificates: ClientCertificates) -> None:
        self._store = store
        self._is_external = certificates.is_external
        self._registry = certificates.registry
        self._unblocking = asyncio.Lock()
        self._unblocked = ""
        """The identity whose block is being deleted from the disk. A new block empties it."""

    async def revoke(self, serial: str) -> list[str]:
        """Revokes a certificate, and all certificates that descend from it by renewal.

        A certificate of a PKI of others need not be known, and nobody knows which descend from it.

        Returns:
            The serial numbers of all of them.

        Raises:
            FleetError: UNKNOWN_CERTIFICATE. STORAGE_UNAVAILABLE, and they are revoked until a restart.
        """
        is_unknown = self._registry.get(serial) is None
        if is_unknown and not (self._is_external and _SERIAL.fullmatch(serial)):
            raise FleetError(
                errors_pb2.ERROR_REASON_UNKNOWN_CERTIFICATE,
                f"no certificate has the serial number {serial[:64]!r}: `leasehold ca list --all` lists "
                "them; to block an identity, write KIND/NAME, as in user/alice",
                field="serial",
            )
        family = self._registry.family(serial)
        await self._end(family, f"certificate/{serial}")
        return family

    async def revoke_all(self, identity: Identity) -> list[str]:
        """Revokes every certificate of an identity, which may join again.

        Returns:
            The serial numbers of those that were not revoked before.

        Raises:
            FleetError: STORAGE_UNAVAILABLE, and they are revoked until a restart.
        """
        serials = [one.serial for one in self._registry.of(identity)]
        valid = [serial for serial in serials if not self._registry.is_revoked(serial)]
        if serials:  # a failed write may have revoked some of them in memory only
            await self._end(serials, str(identity))
        return valid

    async def block(self, identity: Identity) -> Revocation:
        """Blocks an identity on every listener and with each credential.

        Raises:
            FleetError: TOO_MANY_BLOCKS. STORAGE_UNAVAILABLE, and it is blocked until a restart.
        """
        if len(self._registry.blocks()) >= BLOCK_LIMIT and not self._registry.is_revoked(str(identity)):
            raise FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_BLOCKS,
                f"{BLOCK_LIMIT} identities are blocked, which is the limit: `leasehold ca unblock` some",
            )
        (block,) = await self._end([str(identity)], f"block/{identity}")
        return block

    async def _end(self, subjects: Sequence[str], resource: str) -> list[Revocation]:
        """Revokes or blocks, in memory and then in the store. A repetition stores it again.

        Raises:
            FleetError: STORAGE_UNAVAILABLE.
        """
        now_ns, actor = self._store.highest_time_ns, caller()
        ended = [self._registry.revocation(one) or Revocation(one, actor, now_ns) for one in subjects]
        for revocation in ended:
            self._registry.revoke(revocation)
        if self._unblocked in subjects:  # this write follows that of the deletion, so the block stays
            self._unblocked = ""
        logger.warning("%s revoked %s", actor, ", ".join(subjects))
        writing = self._store.write(*map(revocation_row, ended), *change_rows(resource))
        try:
            await self._store.health.unless_stalled(writing)
        except FleetError as error:
            raise FleetError(
                error.reason,
                f"{subjects[0]} is revoked, but only until the coordinator restarts: {error.message}; then "
                "repeat the command",
                retry_after_s=error.retry_after_s,
            ) from error
        return ended

    async def unblock(self, identity: Identity) -> None:
        """Ends a block. A block that begins meanwhile stays.

        Raises:
            FleetError: UNKNOWN_CERTIFICATE, the identity is not blocked. STORAGE_UNAVAILABLE, and it stays
                blocked.
        """
        subject = str(identity)

        async def unblock() -> None:
            async with self._unblocking:
                if not self._registry.is_revoked(subject):
                    raise FleetError(
                        errors_pb2.ERROR_REASON_UNKNOWN_CERTIFICATE,
                        f"{subject} is not blocked: `leasehold ca list` lists the blocked identities",
                        field="identity",
                    )
                self._unblocked = subject
                try:
                    await self._store.write(
                        Gone(schema.revocations, subject), *change_rows(f"block/{subject}")
                    )
                    if self._unblocked:
                        self._registry.restore(subject)
                finally:
                    self._unblocked = ""

        await self._store.health.unless_stalled(unblock(), look_at("ca list"))
        logger.warning("%s unblocked %s", caller(), subject)
