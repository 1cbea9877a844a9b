"""Keys, signing requests and certificates of the worker."""

import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import AttributeOID

from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import Enrolment

DAY_S: Final = 86_400.0
HOUR_S: Final = 3_600.0
MINUTE_S: Final = 60.0
NONCE_BYTES: Final = 16


def new_key() -> str:
    """A new private key on the curve P-256, as PEM."""
    return (
        ec.generate_private_key(ec.SECP256R1())
        .private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        .decode("ascii")
    )


def signing_request(key: str) -> bytes:
    """A new certificate signing request in DER. It proves the possession of the key, and has no name.

    Each request has a random nonce, since the coordinator accepts a request of a join only once.

    Raises:
        StartError: The key is damaged.
    """
    try:
        loaded = serialization.load_pem_private_key(key.encode(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("it is not on an elliptic curve")  # noqa: TRY004 - as for a malformed key
    except ValueError as error:
        raise StartError(
            f"the worker's key in enrolment.json is damaged ({error}): delete the file, and join again with "
            "a token of `leasehold token create --replace`"
        ) from None
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    nonce = secrets.token_hex(NONCE_BYTES).encode()
    request = request.add_attribute(AttributeOID.UNSTRUCTURED_NAME, nonce)
    return request.sign(loaded, hashes.SHA256()).public_bytes(Encoding.DER)


def as_pem(certificates: Iterable[bytes]) -> str:
    """Certificates in DER as one text.

    Raises:
        ValueError: One is malformed.
    """
    parsed = [x509.load_der_x509_certificate(certificate) for certificate in certificates]
    return "".join(one.public_bytes(Encoding.PEM).decode("ascii") for one in parsed)


def serial_numbers(certificates: Iterable[bytes]) -> list[str]:
    """The serial numbers of certificates in DER, in hexadecimal."""
    return [f"{x509.load_der_x509_certificate(one).serial_number:x}" for one in certificates]


def require_valid(enrolment: Enrolment) -> None:
    """Refuses a certificate that the coordinator would refuse.

    Raises:
        StartError: The certificate is malformed, has expired, or is not valid yet.
    """
    again = (
        f"`leasehold token create --worker {enrolment.name} --replace` on the coordinator's host, then "
        "`leasehold worker --join -` with that token; worker id and workloads stay"
    )
    try:
        certificate = x509.load_pem_x509_certificate(enrolment.certificate.encode())
    except ValueError as error:
        raise StartError(
            f"the certificate of {enrolment.identity} is damaged ({error}): join again: {again}"
        ) from None
    now = datetime.now(UTC)
    if (late_s := (now - certificate.not_valid_after_utc).total_seconds()) > 0:
        raise StartError(
            f"the certificate of {enrolment.identity} expired {span_text(late_s)} ago, by this host's clock: "
            f"join again: {again}"
        )
    if (early_s := (certificate.not_valid_before_utc - now).total_seconds()) > 0:
        raise StartError(
            f"the certificate of {enrolment.identity} is valid in {span_text(early_s)} only, by this host's "
            "clock: the clock is behind; set it"
        )


def validity_s(certificate: bytes) -> tuple[float, float]:
    """The times between which a certificate is valid, in seconds of the Unix epoch.

    Raises:
        ValueError: The certificate is malformed.
    """
    parsed = x509.load_pem_x509_certificate(certificate)
    return parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()


def expiry_s(certificate: str) -> float:
    """When a certificate expires, in seconds of the Unix epoch."""
    return validity_s(certificate.encode())[1]


def span_text(span_s: float) -> str:
    """A span of time in its largest unit, such as ``3 days``."""
    for unit_s, unit in ((DAY_S, "day"), (HOUR_S, "hour"), (MINUTE_S, "minute")):
        if span_s >= unit_s:
            count = int(span_s // unit_s)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{span_s:.0f} s"
