"""The HTTP server of the page, from its start to its stop."""

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, cast, final

from aiohttp import web

from leasehold_web import api, pages, streams, tables
from leasehold_web.answers import CONVERSIONS
from leasehold_web.connections import Connections
from leasehold_web.conversions import Conversions
from leasehold_web.entries import Doors
from leasehold_web.feed import Feeds
from leasehold_web.guards import COOKIE, PACE, SESSIONS, add_headers, guard, require_session
from leasehold_web.login_places import LoginPlaces
from leasehold_web.request_pace import RequestPace
from leasehold_web.sessions import Sessions

logger = logging.getLogger(__name__)

BODY_LIMIT_BYTES: Final = 65_536
CONNECTION_LIMIT: Final = 1_024
"""Most connections of a process that serves nothing else."""

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
        connection_limit: Most connections, from their accept on. Further ones are closed at once.
    """

    def __init__(
        self,
        doors: Doors,
        hosts: Collection[str],
        sessions_path: Path | None = None,
        replace_file: Callable[[Path, bytes], None] | None = None,
        connection_limit: int = CONNECTION_LIMIT,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._doors = doors
        self._sessions = Sessions(doors, sessions_path, replace_file)
        self._feeds = Feeds()
        self._runner: web.AppRunner | None = None
        self._connection_limit = connection_limit
        self._connections: Connections | None = None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serves on a bound socket.

        Args:
            listener: The socket, which does not block. It is closed by :meth:`stop`.
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
        app[PACE] = RequestPace()
        app[CONVERSIONS] = Conversions()
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
        server = cast("web.Server", self._runner.server)  # there is one after the setup
        # Accepted connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1_000 * READ_LIMIT_S))
        listener.listen(BACKLOG)
        self._connections = Connections(listener, server, self._connection_limit, tls)

    def replace_tls(self, tls: ssl.SSLContext) -> None:
        """Serves further connections with another certificate, or other authorities of clients."""
        if self._connections is not None:
            self._connections.tls = tls

    async def stop(self) -> None:
        """Ends all connections within seconds."""
        if self._connections is not None:
            await self._connections.stop()
        await self._sessions.stop()
        await self._feeds.stop()
        if self._runner is not None:
            await self._runner.cleanup()
