"""TLS of listeners without gRPC: contexts of the standard library, with the same certificates.

Each connection takes the present context, so renewed and replaced certificates serve the next connection.
"""

import os
import ssl
from typing import Final, Protocol, final

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.server.own_pki import OwnPki
from leasehold_coordinator.server.transport import PRESENT

FILE_NAME: Final = "leasehold-server-certificate"


class HttpTls(Protocol):
    """TLS of one listener. Its clients must present certificates."""

    @property
    def context(self) -> ssl.SSLContext:
        """The context of a new connection."""


@final
class AuthorityTls:
    """TLS with certificates of the coordinator's CA, which are renewed when due.

    Args:
        authorities: Issue the server's certificate.
        names: Names and addresses by which clients call the server.
    """

    def __init__(self, authorities: Authorities, names: frozenset[str]) -> None:
        self._authorities = authorities
        self._names = names
        self._issue()

    @property
    def context(self) -> ssl.SSLContext:
        """The context of a new connection."""
        if PRESENT() >= self._renew_time or self._version != self._authorities.version:
            self._issue()
        return self._context

    def _issue(self) -> None:
        self._version = self._authorities.version
        certificate = self._authorities.issue_server(self._names)
        self._renew_time = certificate.renew_time
        self._context = mutual_context(certificate.key, certificate.chain, self._authorities.pem)


@final
class PkiTls:
    """TLS with the files of a PKI of others, which may change.

    Args:
        pki: The files.
    """

    def __init__(self, pki: OwnPki) -> None:
        self._pki = pki
        self._take()

    @property
    def context(self) -> ssl.SSLContext:
        """The context of a new connection."""
        if self._pki.content is not self._taken:
            self._take()
        return self._context

    def _take(self) -> None:
        self._taken = self._pki.content
        self._context = mutual_context(self._taken.key, self._taken.certificate, self._taken.client_ca)


def mutual_context(
    key: bytes, chain: bytes, client_ca: bytes, verify_mode: ssl.VerifyMode = ssl.CERT_REQUIRED
) -> ssl.SSLContext:
    """A context of a server that asks for client certificates.

    Args:
        key: The server's private key, as PEM.
        chain: The server's certificate and intermediate certificates, as PEM.
        client_ca: The authorities of clients, as PEM.
        verify_mode: Whether a connection without a client certificate is refused.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection presents its certificate
    # The standard library reads a key from a file only. This one is in memory, and has no path for others.
    descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
    try:
        os.write(descriptor, key + b"\n" + chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    context.load_verify_locations(cadata=client_ca.decode("ascii"))
    context.verify_mode = verify_mode
    return context
