"""The HTTP server of the page, from its start to its stop."""

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, final

from aiohttp import web

from leasehold_web import api, pages, streams, tables
from leasehold_web.entries import Doors
from leasehold_web.feed import Feeds
from leasehold_web.guards import COOKIE, SESSIONS, add_headers, guard, require_session, set_headers
from leasehold_web.login_places import LoginPlaces
from leasehold_web.sessions import Sessions

logger = logging.getLogger(__name__)

BODY_LIMIT_BYTES: Final = 65_536
CONNECTION_LIMIT: Final = 1_024
"""Most connections. Further ones are closed at once."""

IDLE_S: Final = 30.0
READ_LIMIT_S: Final = 20.0
"""How long a browser may read nothing of an answer before the kernel ends its connection."""

STOP_S: Final = 2.0
BACKLOG: Final = 128


@final
class WebServer:
    """Serves the page.

    Args:
        doors: The logins.
        hosts: The names and addresses by which browsers call the server.
        sessions_path: The file that keeps the sessions over a restart. None: they end with the process.
        replace_file: Replaces a file, readable by its owner only. Blocks.
    """

    def __init__(
        self,
        doors: Doors,
        hosts: Collection[str],
        sessions_path: Path | None = None,
        replace_file: Callable[[Path, bytes], None] | None = None,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._doors = doors
        self._sessions = Sessions(doors, sessions_path, replace_file)
        self._feeds = Feeds()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._socket: socket.socket | None = None
        """The bound socket, of which the listener has a duplicate."""

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serves on a bound socket.

        Args:
            listener: The socket.
            tls: The certificate. None: HTTP, which is for loopback only.
        """
        await self._sessions.load()
        app = web.Application(
            middlewares=[guard(self._hosts), require_session, pages.explain_missing],
            client_max_size=BODY_LIMIT_BYTES,
        )
        # Cookies know no ports: two pages on one host keep theirs apart by name.
        port = listener.getsockname()[1]
        app[COOKIE] = f"__Host-leasehold-{port}" if tls is not None else f"leasehold-{port}"
        app[SESSIONS] = self._sessions
        app[pages.DOORS] = self._doors
        app[pages.FILES] = await asyncio.to_thread(pages.read_files)
        app[streams.FEEDS] = self._feeds
        app[streams.OPEN] = Counter()
        app[pages.PLACES] = LoginPlaces()
        for module in (pages, api, streams, tables):
            app.add_routes(module.routes())
        app.on_response_prepare.append(add_headers)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=STOP_S,
        )
        await self._runner.setup()
        # Accepted connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1_000 * READ_LIMIT_S))
        loop = asyncio.get_running_loop()
        self._socket = listener.dup()
        self._listener = await loop.create_server(self._accept, sock=listener, ssl=tls, backlog=BACKLOG)

    async def replace_tls(self, tls: ssl.SSLContext) -> None:
        """Serves further connections with another certificate, or other authorities of clients."""
        if self._socket is None or (former := self._listener) is None:
            return
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._accept, sock=self._socket.dup(), ssl=tls, backlog=BACKLOG
        )
        former.close()

    def _accept(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        server = self._runner.server if self._runner is not None else None
        if server is None or len(server.connections) >= CONNECTION_LIMIT:
            return _Refusal()
        return _Connection(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's runner passes it too: no log
        )

    async def stop(self) -> None:
        """Ends all connections within seconds."""
        if self._listener is not None:
            self._listener.close()
        if self._socket is not None:
            self._socket.close()
        await self._sessions.stop()
        await self._feeds.stop()
        if self._runner is not None:
            await self._runner.cleanup()


@final
class _Connection(web.RequestHandler):
    """A connection, whose malformed requests get answers with the headers of all others."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that can't be parsed, or whose handler has failed. It ends the connection.

        A malformed request is not logged: anybody can send one.
        """
        if status < 500 and request.writer.output_size == 0:
            response: web.StreamResponse = web.Response(status=status, text=message)
            response.force_close()
        else:
            response = super().handle_error(request, status, exc, message)
        set_headers(response)
        return response


@final
class _Refusal(asyncio.Protocol):
    """Closes a connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes the connection."""
        transport.close()
