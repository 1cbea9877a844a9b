"""The rotation of the CA: a second one is added, and the first one is retired later."""

import asyncio
import logging
from collections import Counter
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import ConnectResponse

from leasehold_coordinator.access.authority import Authority
from leasehold_coordinator.errors import FleetError, StartError
from leasehold_coordinator.fleet.audit_entries import change_rows
from leasehold_coordinator.fleet.callers import caller
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.shielded_tasks import finish
from leasehold_coordinator.storage.write_health import look_at

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 10.0


@final
class AuthorityChanges:
    """Adds and retires CAs, one after the other.

    Args:
        fleet: The known state, with the sessions that are told.
        certificates: The client certificates.
    """

    def __init__(self, fleet: Fleet, certificates: ClientCertificates) -> None:
        self._store, self._sessions = fleet.store, fleet.sessions
        self._certificates = certificates
        self._authorities = certificates.authorities
        self._changing = asyncio.Lock()

    def counts(self) -> Counter[str]:
        """The number of valid certificates of each CA, by its serial number."""
        return Counter(one.authority for one in self._certificates.valid())

    def serve_newest(self) -> None:
        """Lets the newest CA sign the server's certificate, once each holder of a certificate trusts it."""
        authorities = self._authorities
        if len(authorities.members) < 2 or authorities.is_newest_served:
            return
        if not self._certificates.waiting():
            authorities.serve_newest()
            logger.info("authority %s signs the server's certificate from now on", authorities.newest.serial)

    async def watch(self) -> None:
        """Calls :meth:`serve_newest` over and over. Never returns."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.serve_newest()

    def _tell_all(self) -> None:
        for session in self._sessions.values():
            tell_authorities(self._certificates, session)

    async def rotate(self) -> Authority:
        """Adds a second CA, which signs client certificates from now on.

        Raises:
            FleetError: AUTHORITY_IN_USE, there are two already. STORAGE_UNAVAILABLE. Nothing has changed.
        """
        return await finish(self._rotate())

    async def _rotate(self) -> Authority:
        async with self._changing:
            first = self._authorities.members[0].serial
            if len(self._authorities.members) > 1:
                raise FleetError(
                    errors_pb2.ERROR_REASON_AUTHORITY_IN_USE,
                    f"there are two authorities already: `leasehold ca retire {first}` ends the older one",
                )
            await self._store.health.unless_stalled(
                self._store.write(*change_rows("authority")), look_at("ca list")
            )
            try:
                added = await asyncio.to_thread(self._authorities.add)
            except (OSError, StartError) as error:
                raise _not_written(error) from error
            self._tell_all()
            logger.warning("%s added the authority %s beside %s", caller(), added.serial, first)
            return added

    async def retire(self, serial: str, *, force: bool) -> None:
        """Ends the trust in one of two CAs, and deletes its key.

        Args:
            serial: The serial number of its certificate.
            force: Also if valid client certificates of the CA are left.

        Raises:
            FleetError: UNKNOWN_CERTIFICATE, AUTHORITY_IN_USE or STORAGE_UNAVAILABLE. Nothing has changed.
        """
        await finish(self._retire(serial, force=force))

    async def _retire(self, serial: str, *, force: bool) -> None:
        async with self._changing:
            if serial not in self._authorities.serials:
                raise FleetError(
                    errors_pb2.ERROR_REASON_UNKNOWN_CERTIFICATE,
                    f"no authority has the serial number {serial[:64]!r}: `leasehold ca list` lists them",
                    field="serial",
                )
            if len(self._authorities.members) < 2:
                raise FleetError(
                    errors_pb2.ERROR_REASON_AUTHORITY_IN_USE,
                    f"{serial} is the only authority: `leasehold ca rotate` adds another one first",
                )
            left = [one for one in self._certificates.valid() if one.authority == serial]
            if left and not force:
                raise FleetError(
                    errors_pb2.ERROR_REASON_AUTHORITY_IN_USE,
                    f"{len(left)} valid certificates of the authority are left, such as {left[0].serial} of "
                    f"{left[0].identity}: wait for their expiry, or end the trust in them with --force",
                )
            rows = change_rows(f"authority/{serial}")
            await self._store.health.unless_stalled(self._store.write(*rows), look_at("ca list"))
            try:
                await asyncio.to_thread(self._authorities.remove, serial)
            except OSError as error:
                raise _not_written(error) from error
            self._tell_all()
            logger.warning("%s retired the authority %s", caller(), serial)


def tell_authorities(certificates: ClientCertificates, session: Session) -> None:
    """Sends the certificates of the CAs to a worker that has joined."""
    if session.is_certified and not certificates.is_external:
        authorities = session_pb2.Authorities(certificates=certificates.authorities.der)
        session.send(ConnectResponse(authorities=authorities))


def _not_written(error: OSError | StartError) -> FleetError:
    logger.error("the authorities can't be written: %s", error)
    return FleetError(
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        "the files of the authorities can't be written: look at the coordinator's log and at the disk",
    )
