"""The known client certificates, and which of them are revoked. Pure."""

import datetime
from collections.abc import Container, Iterator
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


@dataclass(frozen=True, slots=True)
class Revocation:
    """A revoked certificate, or a blocked identity.

    Attributes:
        subject: The serial number in hexadecimal, or the identity as ``KIND/NAME``.
        actor: The identity that revoked it.
        create_time_ns: When, in nanoseconds of the Unix epoch.
    """

    subject: str
    actor: str
    create_time_ns: int

    @property
    def is_block(self) -> bool:
        """Whether the subject is an identity."""
        return "/" in self.subject


def why_blocked(subject: str) -> str:
    """Why a blocked identity is refused, which is written as ``KIND/NAME``."""
    return f"{subject} is blocked: an admin may `leasehold ca unblock {subject}`"


@final
class CertificateRegistry:
    """Every stored client certificate, the revoked serial numbers, and the blocked identities."""

    def __init__(self) -> None:
        self._by_serial: dict[str, ClientCertificate] = {}
        self._by_fingerprint: dict[bytes, ClientCertificate] = {}
        self._by_identity: dict[str, dict[str, ClientCertificate]] = {}
        self._successors: dict[str, dict[str, ClientCertificate]] = {}
        """The certificates that renew one, by the serial number of the renewed one."""
        self._revocations: dict[str, Revocation] = {}
        """By subject."""

    def __iter__(self) -> Iterator[ClientCertificate]:
        """Every certificate, in the order of its issue."""
        return iter(self._by_serial.values())

    def add(self, certificate: ClientCertificate) -> None:
        """Adds a certificate."""
        serial = certificate.serial
        self._by_serial[serial] = certificate
        self._by_fingerprint[certificate.fingerprint] = certificate
        self._by_identity.setdefault(str(certificate.identity), {})[serial] = certificate
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
        return list(self._by_identity.get(str(identity), {}).values())

    def successors(self, serial: str) -> list[ClientCertificate]:
        """The certificates that renew one directly, in the order of their issue."""
        return list(self._successors.get(serial, {}).values())

    def family(self, serial: str) -> list[str]:
        """A serial number, and those of all certificates that descend from it by renewal."""
        found = [serial]
        for one in found:
            found += (successor.serial for successor in self.successors(one))
        return found

    def expire_time(
        self, certificate: ClientCertificate, authorities: Container[str]
    ) -> datetime.datetime | None:
        """When the newest valid certificate expires that descends from one by renewal.

        Args:
            certificate: The certificate.
            authorities: The serial numbers of the trusted CAs.

        Returns:
            The time. None: all of them are revoked, or of a retired CA.
        """
        family = (self._by_serial[serial] for serial in self.family(certificate.serial))
        return max(
            (
                one.not_after
                for one in family
                if one.authority in authorities and not self.is_revoked(one.serial)
            ),
            default=None,
        )

    def refusal(
        self,
        identity: Identity,
        serial: str,
        not_after: datetime.datetime,
        now: datetime.datetime,
        authorities: Container[str],
    ) -> str | None:
        """Why the holder of a certificate is refused: what happened and what to do. None: the holder is not.

        A connection outlives its certificate in gRPC. So the holder is refused from the expiry of the newest
        certificate on that renews the connection's certificate.

        Args:
            identity: The identity in the certificate.
            serial: The serial number of the connection's certificate.
            not_after: When the connection's certificate expires.
            now: The present time.
            authorities: The serial numbers of the trusted CAs.
        """
        if self.is_revoked(serial):
            return f"certificate {serial} of {identity} is revoked: ask an admin for a join token"
        certificate = self.get(serial)
        if certificate is not None and (now >= not_after or certificate.authority not in authorities):
            expire_time = self.expire_time(certificate, authorities)
            if expire_time is None:
                return (
                    f"the authority of certificate {serial} of {identity} is retired: ask an admin for a "
                    "join token"
                )
            not_after = expire_time
        if now >= not_after:
            return (
                f"certificate {serial} of {identity} expired at {not_after:%Y-%m-%d %H:%M:%S} UTC: ask an "
                "admin for a join token"
            )
        return None

    def revoke(self, revocation: Revocation) -> None:
        """Revokes a serial number, or blocks an identity."""
        self._revocations.setdefault(revocation.subject, revocation)

    def restore(self, subject: str) -> None:
        """Ends a revocation or a block."""
        self._revocations.pop(subject, None)

    def is_revoked(self, subject: str) -> bool:
        """Whether a serial number is revoked, or an identity that is written as ``KIND/NAME`` is blocked."""
        return subject in self._revocations

    def revocation(self, subject: str) -> Revocation | None:
        """The revocation of a serial number, or the block of an identity."""
        return self._revocations.get(subject)

    def blocks(self) -> list[Revocation]:
        """The blocked identities, sorted."""
        return sorted(
            (one for one in self._revocations.values() if one.is_block), key=lambda one: one.subject
        )

    def forget(self, certificate: ClientCertificate) -> None:
        """Removes a certificate and its revocation."""
        serial = certificate.serial
        del self._by_serial[serial], self._by_fingerprint[certificate.fingerprint]
        for index, key in (
            (self._by_identity, str(certificate.identity)),
            (self._successors, certificate.predecessor),
        ):
            of_key = index.get(key, {})
            of_key.pop(serial, None)
            if not of_key:
                index.pop(key, None)
        self._revocations.pop(serial, None)
