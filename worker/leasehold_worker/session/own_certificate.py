"""Defects of this side's certificate. A coordinator that refuses it only closes the connection."""

import os
import stat
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from leasehold_worker.session.client_keys import validity_s
from leasehold_worker.session.server_certificate import distance_text

FILE_LIMIT_BYTES: Final = 65_536


def certificate_problem(path: Path) -> str | None:
    """Why a coordinator refuses the certificate in a file, and what to do.

    Args:
        path: The file, as PEM.

    Returns:
        A sentence. None: nothing is wrong as far as this side can tell, or the file can't be read.
    """
    try:
        certificate = x509.load_pem_x509_certificate(_content(path))
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        usages = x509.ExtendedKeyUsage([])
    except (OSError, ValueError):
        return None
    distance = distance_text(certificate)
    if distance.endswith(" ago"):
        return f"the certificate {path} has expired{distance}: replace it and its key by a renewed pair"
    if distance:
        return (
            f"the certificate {path} is not valid{distance}: this host's clock is behind, or that of its "
            "issuer was ahead; compare both clocks"
        )
    if ExtendedKeyUsageOID.CLIENT_AUTH not in usages:
        return (
            f"the certificate {path} is not for clients: get one with the extended key usage clientAuth "
            "from its issuer"
        )
    return None


def certificate_validity_s(path: Path) -> tuple[float, float] | None:
    """As :func:`validity_s`, of the certificate in a file. None: the file can't be read."""
    try:
        return validity_s(_content(path))
    except (OSError, ValueError):
        return None


def _content(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return file.read(FILE_LIMIT_BYTES)
