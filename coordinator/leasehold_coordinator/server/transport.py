"""TLS of the listeners: the server's certificate, which renews itself."""

import datetime
import socket
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final, Protocol, cast, final

import grpc

from leasehold_coordinator.access.authorities import Authorities, open_authorities
from leasehold_coordinator.access.authority import DEFAULT_RULES, LOOPBACK_NAMES, IssueRules
from leasehold_coordinator.access.local_tokens import LocalTokens, open_tokens
from leasehold_coordinator.access.private_files import open_directory
from leasehold_coordinator.errors import StartError

PRESENT: Final = partial(datetime.datetime.now, datetime.UTC)
"""The present time."""

WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104 - addresses that are no names of the server


class PortTls(Protocol):
    """TLS of one listener."""

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for the port."""


@final
class ServerTls:
    """The credentials of one listener. gRPC asks each listener for a new certificate, and takes it once.

    Args:
        authorities: Issue the server's certificate.
        names: Names and addresses by which clients call the server.
        is_mutual: Whether each client must present a certificate of the authorities.
    """

    def __init__(self, authorities: Authorities, names: frozenset[str], *, is_mutual: bool = False) -> None:
        self._authorities = authorities
        self._is_mutual = is_mutual
        self._names = names
        self._version = authorities.version
        self._certificate = authorities.issue_server(names)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for the port."""
        # None keeps the present certificate, as gRPC's documentation says, and its types do not.
        renewed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self.renewed)
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), renewed, require_client_authentication=self._is_mutual
        )

    @property
    def renew_time(self) -> datetime.datetime:
        """When another certificate is due."""
        return self._certificate.renew_time

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """A new certificate if one is due or the authorities have changed. None: the present one stays."""
        version = self._authorities.version
        if PRESENT() < self.renew_time and version == self._version:
            return None
        self._version = version
        self._certificate = self._authorities.issue_server(self._names)
        return self._configuration()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = self._certificate.key, self._certificate.chain
        roots = self._authorities.pem if self._is_mutual else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


def open_state(directory: Path, rules: IssueRules = DEFAULT_RULES) -> tuple[Authorities, LocalTokens]:
    """The CAs and the tokens in the state directory, which are created if they are missing.

    Args:
        directory: The state directory.
        rules: How the CAs issue certificates.

    Raises:
        StartError: They can't be created or read, or another user could read or replace them.
    """
    try:
        open_directory(directory)
        return open_authorities(directory, rules), open_tokens(directory)
    except OSError as error:
        raise StartError(
            f"{error.filename or directory} can't be created or read: {error.strerror}; repair that, or "
            "choose another directory with --state-dir"
        ) from error


def server_names(addresses: Collection[str], more: Collection[str] = ()) -> frozenset[str]:
    """Names of this host, the hosts of the listeners' addresses, and those of the settings.

    Args:
        addresses: HOST:PORT of each listener.
        more: Further names and addresses.
    """
    hosts = {address.rpartition(":")[0].strip("[]") for address in addresses} - set(WILDCARDS)
    names = {*LOOPBACK_NAMES, *hosts, socket.gethostname(), *more} - {""}
    return frozenset(name for name in names if name.isascii())
