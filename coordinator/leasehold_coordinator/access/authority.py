"""The certificate authority (CA) of a Unix user's coordinators, and the server's certificate."""

import datetime
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from leasehold_coordinator.access.private_files import create_file, read_file
from leasehold_coordinator.errors import StartError

CERTIFICATE_FILE: Final = "ca.pem"
KEY_FILE: Final = "ca.key"
AUTHORITY_LIFE: Final = datetime.timedelta(days=3650)
SERVER_LIFE: Final = datetime.timedelta(days=90)

CLOCK_DIFFERENCE: Final = datetime.timedelta(minutes=5)
"""How much a peer's clock may be behind. Certificates are valid from this time before their issue."""

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


class ServerCertificate(NamedTuple):
    """A certificate with its key, as PEM.

    Attributes:
        key: The private key.
        chain: The certificate.
        renew_time: When another one is due, at half of its life.
    """

    key: bytes
    chain: bytes
    renew_time: datetime.datetime


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA.

    Attributes:
        certificate: Its certificate.
        key: Its private key.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def issue_server(self, names: Collection[str]) -> ServerCertificate:
        """Issues a certificate for a server with a new key.

        Args:
            names: DNS names and IP addresses, by which clients call the server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_DIFFERENCE)
            .not_valid_after(now + SERVER_LIFE)
            .add_extension(alternatives, critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return ServerCertificate(_pem(key), pem, now + SERVER_LIFE / 2)


def open_authority(directory: Path) -> Authority:
    """Reads the CA, or creates it.

    Raises:
        StartError: Others can read the key or replace a file, or the files are no CA.
        OSError: A file can't be created or read.
    """
    key_path, certificate_path = directory / KEY_FILE, directory / CERTIFICATE_FILE
    if not key_path.exists() and not certificate_path.exists():
        create_file(key_path, _pem(ec.generate_private_key(ec.SECP256R1())))
    key_pem = read_file(key_path, is_secret=True)
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("not a key of an elliptic curve")  # noqa: TRY004 - as for a file without a key
        if not certificate_path.exists():
            create_file(certificate_path, _self_signed(key), mode=0o644)
        certificate = x509.load_pem_x509_certificate(read_file(certificate_path, is_secret=False))
        if certificate.public_key() != key.public_key():
            raise ValueError(f"{CERTIFICATE_FILE} belongs to another key")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise ValueError(f"{CERTIFICATE_FILE} has expired")
        if certificate.not_valid_before_utc > datetime.datetime.now(datetime.UTC):
            raise ValueError(f"{CERTIFICATE_FILE} is not valid yet, by this host's clock")
    except ValueError as error:
        raise StartError(
            f"{key_path} and {CERTIFICATE_FILE} are no certificate authority ({error}): delete both, and new "
            "ones are made"
        ) from error
    return Authority(certificate, key)


def _self_signed(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Leasehold CA")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_DIFFERENCE)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS_CERTIFICATES, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


_SIGNS_CERTIFICATES: Final = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
