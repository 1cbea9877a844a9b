"""The known client certificates, and which of them are revoked. Pure."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from leasehold_coordinator.access.identities import Identity


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """A certificate that the CA has issued to a worker, a user or a service.

    Attributes:
        serial: The serial number, in hexadecimal.
        identity: Who the holder is.
        fingerprint: SHA-256 of the certificate.
        predecessor: The serial number of the certificate that this one renews. Empty: a first certificate.
        authority: The serial number of the CA's certificate.
        not_before: When the certificate becomes valid.
        not_after: When the certificate expires.
        der: The certificate itself.
    """

    serial: str
    identity: Identity
    fingerprint: bytes
    predecessor: str
    authority: str
    not_before: datetime.datetime
    not_after: datetime.datetime
    der: bytes


@final
class CertificateRegistry:
    """Every stored client certificate, the revoked serial numbers, and the blocked identities."""

    def __init__(self) -> None:
        self._by_serial: dict[str, ClientCertificate] = {}
        self._by_fingerprint: dict[bytes, ClientCertificate] = {}
        self._by_identity: dict[Identity, dict[str, ClientCertificate]] = {}
        self._successors: dict[str, dict[str, ClientCertificate]] = {}
        """The certificates that renew one, by the serial number of the renewed one."""
        self._revoked: set[str] = set()
        """Serial numbers, and identities as ``KIND/NAME``."""

    def __iter__(self) -> Iterator[ClientCertificate]:
        """Every certificate, in the order of its issue."""
        return iter(self._by_serial.values())

    def add(self, certificate: ClientCertificate) -> None:
        """Adds a certificate."""
        serial = certificate.serial
        self._by_serial[serial] = certificate
        self._by_fingerprint[certificate.fingerprint] = certificate
        self._by_identity.setdefault(certificate.identity, {})[serial] = certificate
        if certificate.predecessor:
            self._successors.setdefault(certificate.predecessor, {})[serial] = certificate

    def get(self, serial: str) -> ClientCertificate | None:
        """The certificate with this serial number."""
        return self._by_serial.get(serial)

    def find(self, fingerprint: bytes) -> ClientCertificate | None:
        """The certificate with this SHA-256."""
        return self._by_fingerprint.get(fingerprint)

    def of(self, identity: Identity) -> list[ClientCertificate]:
        """The certificates of an identity, in the order of their issue. Some may have expired."""
        return list(self._by_identity.get(identity, {}).values())

    def successors(self, serial: str) -> list[ClientCertificate]:
        """The certificates that renew one directly, in the order of their issue."""
        return list(self._successors.get(serial, {}).values())

    def family(self, serial: str) -> list[str]:
        """A serial number, and those of all certificates that descend from it by renewal."""
        found = [serial]
        for one in found:
            found += (successor.serial for successor in self.successors(one))
        return found

    def expire_time(self, certificate: ClientCertificate) -> datetime.datetime:
        """When the newest certificate expires that descends from one by renewal and is not revoked."""
        family = (self._by_serial[serial] for serial in self.family(certificate.serial))
        return max(
            (one.not_after for one in family if not self.is_revoked(one.serial)),
            default=certificate.not_after,
        )

    def refusal(
        self, identity: Identity, serial: str, not_after: datetime.datetime, now: datetime.datetime
    ) -> str | None:
        """Why the holder of a certificate is refused: what happened and what to do. None: the holder is not.

        A connection outlives its certificate in gRPC. So its calls are served until the newest certificate
        expires that renews the connection's certificate.

        Args:
            identity: The identity in the certificate.
            serial: The serial number of the connection's certificate.
            not_after: When the connection's certificate expires.
            now: The present time.
        """
        if self.is_revoked(serial):
            return f"certificate {serial} of {identity} is revoked: ask an admin for a join token"
        certificate = self.get(serial)
        if now >= not_after and certificate is not None:
            not_after = self.expire_time(certificate)
        if now >= not_after:
            return (
                f"certificate {serial} of {identity} expired at {not_after:%Y-%m-%d %H:%M:%S} UTC: ask an "
                "admin for a join token"
            )
        return None

    def revoke(self, subject: str) -> None:
        """Revokes a serial number, or blocks an identity that is written as ``KIND/NAME``."""
        self._revoked.add(subject)

    def restore(self, subject: str) -> None:
        """Ends a revocation or a block."""
        self._revoked.discard(subject)

    def is_revoked(self, subject: str) -> bool:
        """Whether a serial number is revoked, or an identity that is written as ``KIND/NAME`` is blocked."""
        return subject in self._revoked
