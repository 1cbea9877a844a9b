"""TLS of listeners without gRPC: contexts of the standard library, with the same certificates.

Each connection takes the present context, so renewed and replaced certificates serve the next connection.
"""

import ssl
from typing import Protocol, final

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.server.mutual_context import mutual_context
from leasehold_coordinator.server.own_pki import OwnPki
from leasehold_coordinator.server.transport import PRESENT


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
        content = self._pki.content
        self._context = mutual_context(content.key, content.certificate, content.client_ca)
        self._taken = content  # after success, so that the next connection tries again
