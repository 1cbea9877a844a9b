"""Certificate signing requests (PKCS #10). Pure.

Only the public key of a request gets into a certificate. The digest of a request tells a repeated one.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SIZE_LIMIT_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class SigningRequest:
    """A request whose signer has the private key.

    Attributes:
        key: The public key.
        digest: SHA-256 of the signed part, without the signature: anybody can make a second valid signature
            from an ECDSA signature.
    """

    key: ec.EllipticCurvePublicKey
    digest: bytes


def read_request(csr: bytes) -> SigningRequest:
    """Reads a request.

    Args:
        csr: The request, in DER.

    Raises:
        ValueError: The request is malformed or not signed by its key, or the key is not on P-256.
    """
    if len(csr) > SIZE_LIMIT_BYTES:
        raise ValueError(f"it has {len(csr)} bytes, of at most {SIZE_LIMIT_BYTES}")
    try:
        request = x509.load_der_x509_csr(csr)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("its key is not on the curve P-256")  # noqa: TRY004 - as for malformed bytes
        is_signed, digest = request.is_signature_valid, hashlib.sha256(request.tbs_certrequest_bytes).digest()
    except (UnsupportedAlgorithm, InvalidSignature) as error:
        raise ValueError("its algorithm is not supported") from error
    except x509.InvalidVersion as error:
        raise ValueError("its version is not 1") from error
    if not is_signed:
        raise ValueError("its own key did not sign it")
    return SigningRequest(key, digest)


def key_digest(key: ec.EllipticCurvePublicKey) -> bytes:
    """SHA-256 of a public key."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def certificate_key_digest(certificate: bytes) -> bytes:
    """SHA-256 of the public key in a certificate of ours, in DER."""
    key = x509.load_der_x509_certificate(certificate).public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
