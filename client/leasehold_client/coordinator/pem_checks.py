"""Checks of certificates and keys as PEM, before gRPC gets them.

gRPC reports a defect of these only in lines of its own log, and then as a coordinator that does not answer.
The ssl module of Python reads the same PEM, and gRPC has imported it already.
"""

import os
import ssl
from typing import Final

_KEY_MISMATCH: Final = "KEY_VALUES_MISMATCH"


def has_certificates(pem: bytes) -> bool:
    """Whether a text has one certificate or more, each of which can be read."""
    try:
        _context().load_verify_locations(cadata=pem.decode("ascii", "ignore"))  # comments may be UTF-8
    except (ValueError, ssl.SSLError):
        return False
    return True


def key_problem(certificate: bytes, key: bytes) -> str | None:
    """The defect of the key of a readable certificate, as the end of a sentence about the key.

    Args:
        certificate: The certificate, and those of its issuers.
        key: The private key.

    Returns:
        The defect. None: there is none, or this system has no /proc.
    """
    if b"ENCRYPTED" in key:
        return "is encrypted, and nobody is asked for a passphrase: decrypt it with `openssl pkey`"
    # OpenSSL reads only files here.
    descriptor = os.memfd_create("certificate")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(certificate + b"\n" + key)
        _context().load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    except ssl.SSLError as error:
        if error.reason == _KEY_MISMATCH:
            return "does not belong to the certificate: copy both files from one issue"
        return "holds no private key: copy the file again"
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # the peer decides which keys are strong enough
    return context
