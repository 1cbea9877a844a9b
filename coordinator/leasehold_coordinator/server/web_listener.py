"""The listener for browsers: its socket, and its certificate, which renews itself."""

import asyncio
import logging
import socket
import ssl
from typing import Final, final

from leasehold_web.server import WebServer

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.access.authority import LOOPBACK_NAMES
from leasehold_coordinator.access.private_files import replace_file
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.fleet.audit_refusals import AuditRefusals
from leasehold_coordinator.server.channel_options import PAGE_CONNECTIONS, scaled
from leasehold_coordinator.server.config import is_loopback
from leasehold_coordinator.server.listeners import Listeners
from leasehold_coordinator.server.mutual_context import mutual_context
from leasehold_coordinator.server.own_pki import OwnPki
from leasehold_coordinator.server.ports import check_address
from leasehold_coordinator.server.transport import PRESENT, WILDCARDS
from leasehold_coordinator.server.web_doors import WebDoors

logger = logging.getLogger(__name__)

POLL_S: Final = 60.0
"""Time between two looks for a newer certificate."""


@final
class WebListener:
    """The web page.

    On loopback it has no TLS: a browser would not trust the certificate, and users would learn to ignore the
    warning. Only root can read what passes on loopback.

    Args:
        listeners: Whose callers log in.
        audit: Told of refused logins.
        authorities: Issue the certificate of the server.
        names: Names and addresses by which browsers call the server.
        pki: The PKI of others. None: the CA of the state directory.
    """

    def __init__(
        self,
        listeners: Listeners,
        audit: AuditRefusals,
        authorities: Authorities,
        names: frozenset[str],
        pki: OwnPki | None,
    ) -> None:
        self._authorities = authorities
        self._names = names
        self._pki = pki
        self._has_tls = False
        self._taken: object = None
        """The certificate in use: the version of the authorities, or the contents of files."""
        self._renew_time = PRESENT()
        doors = WebDoors(
            listeners.authentication, audit, listeners.oidc_authentication, listeners.inner_address
        )
        self._server = WebServer(
            doors,
            names | frozenset(LOOPBACK_NAMES),
            listeners.sessions_path,
            replace_file,
            scaled(PAGE_CONNECTIONS),
        )

    async def start(self, address: str) -> str:
        """Serves on an address, and returns its URL.

        Args:
            address: HOST:PORT. Port 0 takes a free port.

        Raises:
            StartError: The address can't be used.
        """
        host, _, port = address.rpartition(":")
        check_address(address, "--web")
        self._has_tls = not is_loopback(host)
        tls = await asyncio.to_thread(self._renew) if self._has_tls else None
        listener = _bind(host.strip("[]"), int(port), address)
        try:
            await self._server.start(listener, tls)
        except OSError as error:
            listener.close()
            raise StartError(
                f"can't listen on {address}: {error.strerror}; choose another with --web"
            ) from error
        scheme = "https" if self._has_tls else "http"
        shown = socket.gethostname() if host.strip("[]") in WILDCARDS else host
        return f"{scheme}://{shown}:{listener.getsockname()[1]}/"

    async def watch(self) -> None:
        """Renews the certificate when it is due. Never returns.

        If the renewal fails, the present certificate stays, and the next look tries again.
        """
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if self._has_tls and (tls := await asyncio.to_thread(self._renew)) is not None:
                    self._server.replace_tls(tls)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                logger.error("the web page keeps its certificate, since the new one can't be used: %s", error)

    async def stop(self) -> None:
        """Ends all connections."""
        await self._server.stop()

    def _renew(self) -> ssl.SSLContext | None:
        """The TLS with the present certificate and authorities. None: both are in use already. Blocks.

        Raises:
            OSError: OpenSSL refuses the certificate, or no file can be opened.
            ValueError: The certificate of an authority is invalid.
        """
        present = self._authorities.version if self._pki is None else self._pki.content
        if self._taken == present and PRESENT() < self._renew_time:
            return None
        if self._pki is not None:
            content = self._pki.content
            chain, key, roots = content.certificate, content.key, content.client_ca
            renew_time = content.expire_time
        else:
            issued = self._authorities.issue_server(self._names)
            chain, key, roots = issued.chain, issued.key, self._authorities.pem
            renew_time = issued.renew_time
        # A context of its own, since one that is in use can't forget authorities.
        context = mutual_context(key, chain, roots, ssl.CERT_OPTIONAL)
        context.set_alpn_protocols(["http/1.1"])
        self._taken, self._renew_time = present, renew_time  # after success, so that a failure is tried again
        return context


def _bind(host: str, port: int, address: str) -> socket.socket:
    """A socket that is bound to an address.

    Raises:
        StartError: The address can't be used.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setblocking(False)
        found.bind(where)
    except OSError as error:
        raise StartError(f"can't listen on {address}: {error.strerror}; choose another with --web") from error
    return found
