"""The client certificate that a connection presents: its identity, if it has the right form."""

import datetime
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from leasehold_coordinator.access.authority import serial_text
from leasehold_coordinator.access.identities import SCHEME, Identity, parse_uri

PARSED_LIMIT: Final = 4_096
"""Certificates whose parsed form is kept, so that not each call parses its certificate."""


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """A presented certificate of the right form. TLS has verified its chain and the holder's key.

    Attributes:
        identity: The identity in its only URI.
        serial: The serial number, in hexadecimal.
        fingerprint: SHA-256 of the certificate.
        not_after: When the certificate expires.
    """

    identity: Identity
    serial: str
    fingerprint: bytes
    not_after: datetime.datetime


@lru_cache(maxsize=PARSED_LIMIT)
def parse_peer_certificate(pem: bytes, trust_domain: str) -> PeerCertificate:
    """Reads a presented certificate.

    Raises:
        ValueError: The certificate has not exactly one identity of the trust domain, or is not for clients.
            The message has the expected form.
    """
    certificate = x509.load_pem_x509_certificate(pem)
    uris = _uris(certificate)
    if len(uris) != 1:
        raise ValueError(
            f"the certificate has {len(uris)} URIs in its subjectAltName: expected one, such as "
            f"{SCHEME}://{trust_domain}/user/NAME"
        )
    identity = parse_uri(uris[0], trust_domain)
    if ExtendedKeyUsageOID.CLIENT_AUTH not in _usages(certificate):
        raise ValueError(f"the certificate of {identity} lacks the extended key usage clientAuth")
    return PeerCertificate(
        identity,
        serial_text(certificate),
        certificate.fingerprint(hashes.SHA256()),
        certificate.not_valid_after_utc,
    )


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return found.value.get_values_for_type(x509.UniformResourceIdentifier)


def _usages(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    try:
        return list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return []
