"""The listener for browsers: its socket, and its certificate, which renews itself."""

import asyncio
import os
import socket
import ssl
import tempfile
from typing import Final, final

from leasehold_web.server import WebServer

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.access.authority import LOOPBACK_NAMES
from leasehold_coordinator.access.private_files import replace_file
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server.config import is_loopback
from leasehold_coordinator.server.listeners import Listeners
from leasehold_coordinator.server.own_pki import OwnPki
from leasehold_coordinator.server.ports import check_address
from leasehold_coordinator.server.transport import PRESENT, WILDCARDS
from leasehold_coordinator.server.web_doors import WebDoors

POLL_S: Final = 60.0
"""Time between two looks for a newer certificate."""


@final
class WebListener:
    """The web page.

    On loopback it has no TLS: a browser would not trust the certificate, and users would learn to ignore the
    warning. Only root can read what passes on loopback.

    Args:
        listeners: Whose callers log in.
        authorities: Issue the certificate of the server.
        names: Names and addresses by which browsers call the server.
        pki: The PKI of others. None: the CA of the state directory.
    """

    def __init__(
        self,
        listeners: Listeners,
        authorities: Authorities,
        names: frozenset[str],
        pki: OwnPki | None,
    ) -> None:
        self._authorities = authorities
        self._names = names
        self._pki = pki
        self._tls: ssl.SSLContext | None = None
        self._taken: object = None
        """The certificate that the context has: the version of the authorities, or the contents of files."""
        self._renew_time = PRESENT()
        doors = WebDoors(listeners.authentication, listeners.oidc_authentication, listeners.inner_address)
        self._server = WebServer(
            doors, names | frozenset(LOOPBACK_NAMES), listeners.sessions_path, replace_file
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
        if not is_loopback(host):
            await asyncio.to_thread(self._renew)
        listener = _bind(host.strip("[]"), int(port), address)
        try:
            await self._server.start(listener, self._tls)
        except OSError as error:
            listener.close()
            raise StartError(
                f"can't listen on {address}: {error.strerror}; choose another with --web"
            ) from error
        scheme = "http" if self._tls is None else "https"
        shown = socket.gethostname() if host.strip("[]") in WILDCARDS else host
        return f"{scheme}://{shown}:{listener.getsockname()[1]}/"

    async def watch(self) -> None:
        """Renews the certificate when it is due. Never returns."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._tls is not None:
                await asyncio.to_thread(self._renew)

    async def stop(self) -> None:
        """Ends all connections."""
        await self._server.stop()

    def _renew(self) -> None:
        """Loads the present certificate, for new connections. Blocks."""
        present = self._authorities.version if self._pki is None else self._pki.content
        if self._tls is not None and self._taken == present and PRESENT() < self._renew_time:
            return
        if self._pki is not None:
            content = self._pki.content
            chain, key, roots = content.certificate, content.key, content.client_ca
            self._renew_time = content.expire_time
        else:
            issued = self._authorities.issue_server(self._names)
            chain, key, roots = issued.chain, issued.key, self._authorities.pem
            self._renew_time = issued.renew_time
        if self._tls is None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
            self._tls.verify_mode = ssl.CERT_OPTIONAL
            self._tls.set_alpn_protocols(["http/1.1"])
        self._tls.load_verify_locations(cadata=roots.decode())
        # The module takes a certificate only from a file.
        with tempfile.NamedTemporaryFile(prefix="leasehold-web-", mode="wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(key + b"\n" + chain)
            file.flush()
            self._tls.load_cert_chain(file.name)
        self._taken = present


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
