"""Issues, stores and revokes client certificates.

The one owner of their state: :class:`CertificateRegistry` is the copy in memory.
"""

import datetime
import itertools
import logging
from collections.abc import Container, Iterator, Sequence
from typing import Final, final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.certificates import (
    CertificateRegistry,
    ClientCertificate,
    Revocation,
    why_blocked,
)
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.peer_certificates import PeerCertificate
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import caller
from leasehold_coordinator.shielded_tasks import finish
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import Change, Gone, certificate_row, clock_row, revocation_row
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import from_unix_ns

logger = logging.getLogger(__name__)

KEPT_AFTER_EXPIRY: Final = datetime.timedelta(days=30)
"""How long an expired certificate stays in lists."""

RECONNECT_AFTER_S: Final = 0.2
"""After which delay a client repeats a call on a new connection, once its certificate is replaced."""

DELETE_LIMIT: Final = 250
"""Most certificates of one deletion."""


@final
class ClientCertificates:
    """The client certificates of one coordinator, in memory and in the store.

    Args:
        store: The store.
        authorities: Sign certificates.
        registry: Receives the certificates, revocations and blocks of the store.
        is_external: Whether a PKI of others issues the certificates, so that the store knows none.
        is_store_restored: Whether the store is an older copy, which lacks the certificates issued since.
    """

    def __init__(
        self,
        store: Store,
        authorities: Authorities,
        registry: CertificateRegistry,
        *,
        is_external: bool = False,
        is_store_restored: bool = False,
    ) -> None:
        self._store = store
        self.authorities = authorities
        self.is_external = is_external
        self._is_store_restored = is_store_restored
        self._taken_back: list[ClientCertificate] = []
        """Certificates that the restored store lacks, until they are stored."""
        self.registry = registry
        self._confirmed: dict[Identity, str] = {}
        """The newest CA that each identity has confirmed to trust, by serial number."""

    async def load(self) -> None:
        """Loads certificates and revocations from the store.

        Raises:
            FleetError: STORAGE_DAMAGED or STORAGE_UNAVAILABLE.
        """
        for certificate in await self._store.certificates():
            self.registry.add(certificate)
        for revocation in await self._store.revocations():
            self.registry.revoke(revocation)

    def find(self, pem: bytes, found: PeerCertificate) -> ClientCertificate | None:
        """The record of a certificate that a connection presents.

        A restored store lacks the certificates that were issued since its backup. They are taken back, or
        workers that have renewed theirs since would have to join again.

        Args:
            pem: The certificate. TLS has verified it.
            found: The parsed certificate.
        """
        known = self.registry.find(found.fingerprint)
        if known is not None or not self._is_store_restored:
            return known
        certificate = x509.load_pem_x509_certificate(pem)
        authority = self.authorities.issuer_of(certificate)
        if authority is None:
            return None
        known = ClientCertificate(
            found.serial,
            found.identity,
            found.fingerprint,
            "",
            authority.serial,
            certificate.not_valid_before_utc,
            found.not_after,
            certificate.public_bytes(Encoding.DER),
        )
        self.registry.add(known)
        self._taken_back.append(known)
        logger.warning("the store lacks certificate %s of %s: it is taken back", known.serial, known.identity)
        return known

    async def store_taken_back(self) -> None:
        """Stores the certificates that were taken back.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next call tries again.
        """
        if waiting := tuple(self._taken_back):
            await self._store.write(*map(certificate_row, waiting))
            del self._taken_back[: len(waiting)]

    @property
    def trust_domain(self) -> str:
        """The trust domain of identities in certificates."""
        return self.authorities.rules.trust_domain

    @property
    def now(self) -> datetime.datetime:
        """The highest time that the store has seen, which counts for expiry."""
        return from_unix_ns(self._store.highest_time_ns)

    def refusal(self, caller: Caller) -> FleetError | None:
        """Why a caller is refused by now. None: the caller is not."""
        identities = {caller.identity, caller.owner}
        blocked = [] if caller.is_local_admin else [one for one in identities if self.is_blocked(one)]
        why: str | None = None
        if blocked:
            why = why_blocked(str(blocked[0]))
        elif caller.expire_time is not None:
            if caller.serial:
                why = self.registry.refusal(
                    caller.identity, caller.serial, caller.expire_time, self.now, self.authorities.serials
                )
                if why is None and caller.identity.kind is not Kind.WORKER and caller.expire_time <= self.now:
                    # A worker has one session. The holder of another's copied key would keep a connection for
                    # as long as the owner renews.
                    return FleetError(
                        errors_pb2.ERROR_REASON_UNAUTHENTICATED,
                        f"certificate {caller.serial} of {caller.identity} has expired, and was renewed: "
                        "connect again with the newer certificate",
                        retry_after_s=RECONNECT_AFTER_S,
                    )
            elif caller.expire_time <= self.now:
                why = f"the token of {caller.identity} has expired: get another one from the issuer"
        return FleetError(errors_pb2.ERROR_REASON_UNAUTHENTICATED, why) if why is not None else None

    def is_expired_or_revoked(self, certificate: ClientCertificate) -> bool:
        """Whether a certificate is expired or revoked. Nothing makes it valid again."""
        return certificate.not_after <= self.now or self.registry.is_revoked(certificate.serial)

    def is_valid(self, certificate: ClientCertificate) -> bool:
        """Whether a certificate is neither expired nor revoked, and is of a trusted CA."""
        is_trusted = certificate.authority in self.authorities.serials
        return is_trusted and not self.is_expired_or_revoked(certificate)

    def valid(self) -> Iterator[ClientCertificate]:
        """The valid certificates."""
        return filter(self.is_valid, self.registry)

    def confirm(self, identity: Identity, authorities: Container[str]) -> None:
        """Notes that an identity trusts CAs, given by their serial numbers."""
        newest = self.authorities.newest.serial
        if newest in authorities:
            self._confirmed[identity] = newest

    def waiting(self) -> list[Identity]:
        """The identities with valid certificates that have not confirmed that they trust the newest CA.

        An identity is in the list for two lives of a certificate at most, also if it never confirms. Renewals
        are signed by the newest CA. The next renewal needs a call with such a certificate, which confirms.
        """
        newest = self.authorities.newest.serial
        identities = dict.fromkeys(one.identity for one in self.valid() if not self.is_blocked(one.identity))
        return [one for one in identities if self._confirmed.get(one) != newest]

    def is_blocked(self, identity: Identity) -> bool:
        """Whether an identity is blocked on every listener, with each credential."""
        return self.registry.is_revoked(str(identity))

    async def prune(self) -> None:
        """Deletes certificates that expired long ago, with their revocations: some at a time.

        Raises:
            FleetError: STORAGE_UNAVAILABLE, nothing was deleted.
        """
        due = self.now - KEPT_AFTER_EXPIRY
        old = list(itertools.islice((one for one in self.registry if one.not_after < due), DELETE_LIMIT))
        if not old:
            return
        gone = [(schema.certificates, one.serial) for one in old]
        gone += [(schema.revocations, one.serial) for one in old if self.registry.is_revoked(one.serial)]
        await self._store.write(*(Gone(table, key) for table, key in gone))
        for certificate in old:
            self.registry.forget(certificate)

    async def issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        identity: Identity,
        *,
        predecessor: str = "",
        replaced: Sequence[str] = (),
        rows: Sequence[Change] = (),
    ) -> ClientCertificate:
        """Issues a certificate and stores it in one transaction with other rows.

        The certificate is stored and known also if the caller is cancelled.

        Args:
            public_key: The client's key, whose possession the client has proven.
            identity: Who the client is.
            predecessor: The serial number of the certificate that the new one renews. Empty: none.
            replaced: Serial numbers that the same transaction revokes.
            rows: Other rows of the transaction.

        Raises:
            FleetError: NOT_PERMITTED, the identity is blocked. UNAUTHENTICATED, the predecessor is revoked.
                UNSUPPORTED_CAPABILITY. STORAGE_UNAVAILABLE. Nothing has changed.
        """
        if self.is_external:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                "a PKI of others issues the certificates, by the setting tls_certificate: get one there",
            )
        if self.registry.is_revoked(predecessor):
            raise _revoked(predecessor)
        if self.is_blocked(identity):
            raise FleetError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"{identity} is blocked, so it gets no certificate: `leasehold ca unblock {identity}`",
            )
        issued = self.authorities.issue_client(public_key, identity, predecessor)
        return await finish(self._keep(issued, replaced, rows))

    async def _keep(
        self, issued: ClientCertificate, replaced: Sequence[str], rows: Sequence[Change]
    ) -> ClientCertificate:
        """Stores a certificate, and then knows it."""
        revocations = [Revocation(serial, caller(), self._store.highest_time_ns) for serial in replaced]
        clock = clock_row(self._store.highest_time_ns)
        await self._store.write(certificate_row(issued), clock, *map(revocation_row, revocations), *rows)
        self.registry.add(issued)
        for revocation in revocations:
            self.registry.revoke(revocation)
        if (end := self.registry.revocation(issued.predecessor)) is not None:
            # The predecessor was revoked during the write, when nobody knew of the new certificate.
            own = Revocation(issued.serial, end.actor, end.create_time_ns)
            self.registry.revoke(own)
            await self._store.write(revocation_row(own))
            raise _revoked(issued.predecessor)
        logger.info("issued certificate %s of %s", issued.serial, issued.identity)
        return issued


def _revoked(serial: str) -> FleetError:
    return FleetError(
        errors_pb2.ERROR_REASON_UNAUTHENTICATED,
        f"certificate {serial} is revoked, and can't be renewed: ask an admin for a join token",
    )
