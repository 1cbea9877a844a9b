"""The certificate authority (CA) of a Unix user's coordinators. It signs all certificates."""

import datetime
import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from leasehold_coordinator.access.certificates import ClientCertificate
from leasehold_coordinator.access.identities import Identity
from leasehold_coordinator.access.local_tokens import CLIENT_FILE
from leasehold_coordinator.access.private_files import create_file, read_file
from leasehold_coordinator.errors import StartError

CERTIFICATE_FILE: Final = "ca.pem"
KEY_FILE: Final = "ca.key"
NEXT_KEY_FILE: Final = "ca-next.key"
"""The key of the second CA, until the first is retired."""

CLOCK_DIFFERENCE: Final = datetime.timedelta(minutes=5)
"""How much a peer's clock may be behind. Certificates are valid from this time before their issue."""

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


class IssueRules(NamedTuple):
    """How certificates are issued.

    Attributes:
        trust_domain: The trust domain of identities in client certificates.
        authority_life: How long a new CA is valid.
        server_life: How long a certificate of the coordinator is valid.
        client_life: How long a certificate of a worker, a user or a service is valid.
    """

    trust_domain: str = "leasehold"
    authority_life: datetime.timedelta = datetime.timedelta(days=3650)
    server_life: datetime.timedelta = datetime.timedelta(days=90)
    client_life: datetime.timedelta = datetime.timedelta(days=30)


DEFAULT_RULES: Final = IssueRules()


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
        rules: How it issues certificates. None is valid for longer than its own.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    rules: IssueRules = DEFAULT_RULES

    @property
    def pem(self) -> bytes:
        """The CA's certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def serial(self) -> str:
        """The serial number of the CA's certificate, in hexadecimal."""
        return serial_text(self.certificate)

    def issue_server(self, names: Collection[str]) -> ServerCertificate:
        """Issues a certificate for a server with a new key.

        Args:
            names: DNS names and IP addresses, by which clients call the server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [_general_name(name) for name in names]
        certificate = self._issue(
            key.public_key(), alternatives, ExtendedKeyUsageOID.SERVER_AUTH, self.rules.server_life
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        return ServerCertificate(_pem(key), pem, certificate.not_valid_after_utc - left / 2)

    def issue_client(
        self,
        public_key: ec.EllipticCurvePublicKey,
        identity: Identity,
        predecessor: str = "",
        life: datetime.timedelta | None = None,
    ) -> ClientCertificate:
        """Issues a certificate for a worker, a user or a service. The caller stores the certificate.

        Args:
            public_key: The client's key, whose possession the client has proven.
            identity: Who the client is.
            predecessor: The serial number of the renewed certificate. Empty: this is a first certificate.
            life: How long the certificate is valid. None: as the rules say.
        """
        uri = x509.UniformResourceIdentifier(identity.uri(self.rules.trust_domain))
        certificate = self._issue(
            public_key, [uri], ExtendedKeyUsageOID.CLIENT_AUTH, life or self.rules.client_life
        )
        return ClientCertificate(
            serial=serial_text(certificate),
            identity=identity,
            fingerprint=certificate.fingerprint(hashes.SHA256()),
            predecessor=predecessor,
            authority=self.serial,
            not_before=certificate.not_valid_before_utc,
            not_after=certificate.not_valid_after_utc,
            der=certificate.public_bytes(serialization.Encoding.DER),
        )

    def _issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        names: Sequence[x509.GeneralName],
        usage: x509.ObjectIdentifier,
        life: datetime.timedelta,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_DIFFERENCE)
            .not_valid_after(min(now + life, self.certificate.not_valid_after_utc))
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )


def serial_text(certificate: x509.Certificate) -> str:
    """A certificate's serial number, in hexadecimal."""
    return f"{certificate.serial_number:x}"


def open_authority(directory: Path, rules: IssueRules = DEFAULT_RULES) -> Authority:
    """Reads the CA, or creates it.

    Args:
        directory: The state directory.
        rules: How it issues certificates.

    Raises:
        StartError: Others can read the key or replace a file, or the files are no CA.
        OSError: A file can't be created or read.
    """
    key_path, certificate_path = directory / KEY_FILE, directory / CERTIFICATE_FILE
    # A start creates tokens last, so a certificate that is missing beside tokens was lost, and peers know it.
    # Tokens are looked for first: another coordinator may be starting.
    has_served = (directory / CLIENT_FILE).exists()
    if not key_path.exists() and not certificate_path.exists():
        create_file(key_path, _pem(ec.generate_private_key(ec.SECP256R1())))
        has_served = False
    try:
        key = load_key(key_path)
    except FileNotFoundError as error:
        raise no_authority(key_path, ValueError(f"{KEY_FILE} is missing")) from error
    try:
        if not certificate_path.exists():
            if has_served:
                raise ValueError(f"{CERTIFICATE_FILE} is missing")
            create_file(certificate_path, _self_signed(key, rules.authority_life), mode=0o644)
        certificate = x509.load_pem_x509_certificate(read_file(certificate_path, is_secret=False))
        if certificate.public_key() != key.public_key():
            raise ValueError(f"{CERTIFICATE_FILE} belongs to another key")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise ValueError(f"{CERTIFICATE_FILE} has expired")
        if certificate.not_valid_before_utc > datetime.datetime.now(datetime.UTC):
            raise ValueError(f"{CERTIFICATE_FILE} is not valid yet, by this host's clock")
    except ValueError as error:
        raise no_authority(key_path, error) from error
    return Authority(certificate, key, rules)


def create_authority(key_path: Path, rules: IssueRules) -> Authority:
    """Creates a CA with a new key in a new file. The caller stores its certificate.

    Raises:
        OSError: The file can't be created.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    create_file(key_path, _pem(key))
    return Authority(x509.load_pem_x509_certificate(_self_signed(key, rules.authority_life)), key, rules)


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a CA.

    Raises:
        StartError: Others can read the key, or the file holds none.
        OSError: The file can't be read.
    """
    data = read_file(path, is_secret=True)
    try:
        key = serialization.load_pem_private_key(data, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("not a key of an elliptic curve")  # noqa: TRY004 - as for a file without a key
    except ValueError as error:
        raise no_authority(path, error) from error
    return key


def no_authority(key_path: Path, error: ValueError) -> StartError:
    """The error for files of a CA that can't be used.

    A remaining ``ca-next.key`` would stop the next start too, so the advice names that file where it exists.
    """
    directory = key_path.parent
    is_rotating = (directory / NEXT_KEY_FILE).exists()
    files = f"{KEY_FILE}, {CERTIFICATE_FILE} and {NEXT_KEY_FILE}" if is_rotating else "both"
    return StartError(
        f"{key_path} and {CERTIFICATE_FILE} are no certificate authority ({error}): restore them from a "
        f"backup, or delete {files}, and new ones are made, for which workers and users must enrol again"
    )


def _self_signed(key: ec.EllipticCurvePrivateKey, life: datetime.timedelta) -> bytes:
    serial = x509.random_serial_number()
    # A name of its own: a verifier finds the issuer of a certificate by name.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Leasehold CA {serial:x}"[:64])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - CLOCK_DIFFERENCE)
        .not_valid_after(now + life)
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
