"""TLS of the port for metrics: the files of a PKI of others, which are read again when they change."""

import logging
import ssl
from pathlib import Path
from typing import Final, NamedTuple, final

import trio

from leasehold_worker.errors import StartError
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 30.0


class MetricsTlsFiles(NamedTuple):
    """The files of the settings, as PEM.

    Attributes:
        certificate: The server's certificate and intermediate certificates.
        key: Its private key.
        client_ca: The authorities of the clients.
    """

    certificate: Path
    key: Path
    client_ca: Path


@final
class MetricsTls:
    """The present TLS of the port.

    Args:
        files: The files.

    Raises:
        StartError: A file can't be read, or they do not fit together.
    """

    def __init__(self, files: MetricsTlsFiles) -> None:
        self._files = files
        self._seen = self._found()
        self._error = ""
        try:
            self.context = self._read()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise StartError(
                f"the files of metrics_tls_certificate, metrics_tls_key and metrics_tls_client_ca can't be "
                f"used ({error}): give a server certificate with its key, and the authorities of the clients"
            ) from error

    async def run(self) -> None:
        """Reads changed files until cancelled. Unusable files are reported, and the previous ones stay."""
        while True:
            await trio.sleep(POLL_INTERVAL_S)
            try:
                await run_in_thread(self.poll, abandon_on_cancel=True)
            except OSError as error:
                logger.warning("the TLS files of metrics can't be read for now: %s", error)

    def poll(self) -> None:
        """Reads the files if they differ from those in use. Blocks.

        Unusable files are read again by each call: a change of permissions changes no modification time. An
        unchanged error is reported once.
        """
        found = self._found()
        if found == self._seen:
            self._error = ""
            return
        try:
            self.context = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._error:
                logger.error(
                    "the changed TLS files of metrics are ignored, and the previous ones stay: %s", error
                )
            self._error = str(error)
        else:
            self._seen, self._error = found, ""
            logger.info("read the changed TLS files of metrics")

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._files.certificate, self._files.key)
        context.load_verify_locations(self._files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _found(self) -> list[tuple[int, ...]]:
        """Identifiers of the present contents of the files."""
        found: list[tuple[int, ...]] = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                found.append(())
            else:
                found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return found
