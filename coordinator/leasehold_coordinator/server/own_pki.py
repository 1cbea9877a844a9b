"""The server's certificate and the client authorities of a PKI of others, in files that may change.

The files are polled, since a mounted secret is replaced by a change of a link.
"""

import asyncio
import datetime
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast, final

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server.mutual_context import mutual_context
from leasehold_coordinator.server.transport import PRESENT

logger = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 5.0
FILE_LIMIT_BYTES: Final = 1_000_000
LATE_WARNING: Final = datetime.timedelta(days=7)
"""Remaining life of the server's certificate from which on the log warns each day.

A third of its life instead, if that is less: a short-lived certificate never has more."""

DAY: Final = datetime.timedelta(days=1)

_UNREADABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
"""The errors of the library for contents that are no certificate or key, or of an unknown kind."""


class PkiFiles(NamedTuple):
    """The files of the settings.

    Attributes:
        certificate: The server's certificate and intermediate certificates, as PEM (``tls_certificate``).
        key: The server's private key, as PEM (``tls_key``).
        client_ca: The certificates of the authorities of clients and workers, as PEM (``tls_client_ca``).
    """

    certificate: Path
    key: Path
    client_ca: Path


@dataclass(frozen=True, slots=True)
class PkiContent:
    """The contents of the files, which fit together, and which OpenSSL accepts.

    Attributes:
        certificate: The server's certificate with its intermediate certificates.
        key: The server's private key.
        client_ca: The certificates of the authorities of clients and workers.
        begin_time: When the validity of the server's certificate begins.
        expire_time: When the server's certificate expires.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes
    begin_time: datetime.datetime
    expire_time: datetime.datetime


@final
class OwnPki:
    """The files, and their last valid contents.

    Args:
        files: The files.

    Raises:
        StartError: A file can't be read, or the files do not fit together.
    """

    def __init__(self, files: PkiFiles) -> None:
        self._files = files
        self._seen = self._found()
        self._error = ""
        self._warned = datetime.datetime.min.replace(tzinfo=datetime.UTC)
        try:
            self.content = read_pki(files)
        except ValueError as error:
            raise StartError(f"the files of tls_certificate, tls_key and tls_client_ca: {error}") from error

    async def watch(self) -> None:
        """Reads the files whenever they change. Never returns."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await asyncio.to_thread(self.poll)

    def poll(self) -> None:
        """Reads the files if they differ from the contents in use. Blocks.

        Invalid contents are ignored, and read again by each call: a change of permissions, or the time from
        which a certificate is valid, changes no modification time. An unchanged error is reported once.
        """
        left = self.content.expire_time - PRESENT()
        life = self.content.expire_time - self.content.begin_time
        if left < min(LATE_WARNING, life / 3) and PRESENT() - self._warned > DAY:
            self._warned = PRESENT()
            logger.warning("%s expires at %s: replace it", self._files.certificate, self.content.expire_time)
        found = self._found()
        if found == self._seen:
            self._error = ""
            return
        try:
            self.content = read_pki(self._files)
        except ValueError as error:
            if str(error) != self._error:
                logger.error("the changed TLS files are ignored, and the previous ones stay: %s", error)
            self._error = str(error)
        else:
            self._seen, self._error = found, ""
            logger.info(
                "read the changed TLS files; the new certificate expires at %s", self.content.expire_time
            )

    def _found(self) -> list[tuple[int, ...]]:
        """The identity of the present contents of each file."""
        found: list[tuple[int, ...]] = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                found.append(())
            else:
                found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return found


@final
class OwnPkiTls:
    """The credentials of one listener. gRPC asks each listener for changed files, and takes them once.

    Args:
        pki: The files.
        is_mutual: Whether each client must present a certificate.
    """

    def __init__(self, pki: OwnPki, *, is_mutual: bool) -> None:
        self._pki = pki
        self._is_mutual = is_mutual
        self._taken = pki.content

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for the port."""
        changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._changed)
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), changed, require_client_authentication=self._is_mutual
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        if self._pki.content is self._taken:
            return None
        self._taken = self._pki.content
        return self._configuration()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        taken = self._taken
        roots = taken.client_ca if self._is_mutual else None
        return grpc.ssl_server_certificate_configuration(
            [(taken.key, taken.certificate)], root_certificates=roots
        )


def read_pki(files: PkiFiles) -> PkiContent:
    """Reads the files.

    Raises:
        ValueError: A file can't be read, they do not fit together, or OpenSSL refuses them. The message names
            file and rule.
    """
    certificate = _read(files.certificate, "tls_certificate")
    client_ca = _read(files.client_ca, "tls_client_ca")
    key_pem = _read(files.key, "tls_key", is_secret=True)
    try:
        first = x509.load_pem_x509_certificates(certificate)[0]
        public_key = first.public_key()
    except _UNREADABLE as error:
        raise ValueError(f"{files.certificate} holds no certificate as PEM: {error}") from error
    try:
        x509.load_pem_x509_certificates(client_ca)
    except _UNREADABLE as error:
        raise ValueError(f"{files.client_ca} holds no certificate as PEM: {error}") from error
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except _UNREADABLE as error:
        raise ValueError(f"{files.key} holds no private key as PEM without a password") from error
    if key.public_key() != public_key:
        raise ValueError(f"{files.key} is not the key of the first certificate in {files.certificate}")
    if not first.not_valid_before_utc <= PRESENT() < first.not_valid_after_utc:
        raise ValueError(
            f"{files.certificate} is not valid now, but from {first.not_valid_before_utc} to "
            f"{first.not_valid_after_utc}"
        )
    try:
        mutual_context(key_pem, certificate, client_ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ValueError(
            f"{files.certificate} or {files.client_ca} can't be used for TLS ({error}): give certificates "
            "with keys that OpenSSL accepts, such as P-256 or RSA of 2,048 bits"
        ) from error
    return PkiContent(certificate, key_pem, client_ca, first.not_valid_before_utc, first.not_valid_after_utc)


def _read(path: Path, setting: str, *, is_secret: bool = False) -> bytes:
    """The content of a file, which may be a link: mounted secrets are.

    Raises:
        ValueError: It can't be read, is not a regular file, too large, or a secret that every user can read.
    """
    try:
        return _content(path, is_secret=is_secret)
    except OSError as error:
        raise ValueError(f"{path} of the setting {setting} can't be read: {error.strerror}") from error


def _content(path: Path, *, is_secret: bool) -> bytes:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if is_secret and found.st_mode & 0o007:
            raise ValueError(f"every user of this host may read or write {path}: give it the mode 0600")
        content = file.read(FILE_LIMIT_BYTES + 1)
    if len(content) > FILE_LIMIT_BYTES:
        raise ValueError(f"{path} has more than {FILE_LIMIT_BYTES} bytes")
    return content
