"""The connections of browsers, which are bounded from their accept on.

aiohttp knows a connection only after its TLS handshake. So connections are accepted here, and those in their
handshake count too.
"""

import asyncio
import logging
import socket
import ssl
from typing import Final, final

from aiohttp import web

from leasehold_web.guards import set_headers

logger = logging.getLogger(__name__)

HANDSHAKE_LIMIT_S: Final = 10.0
IDLE_S: Final = 30.0
ACCEPT_PAUSE_S: Final = 1.0
"""Pause after a failed accept, such as one beyond the limit of open files."""


@final
class Connections:
    """Accepts the connections of a listening socket, until :meth:`stop`.

    Args:
        listener: The socket.
        server: Answers the requests.
        limit: Most connections. Further ones are closed at once.
        tls: The certificate of the next connections. None: HTTP.
    """

    def __init__(
        self, listener: socket.socket, server: web.Server, limit: int, tls: ssl.SSLContext | None
    ) -> None:
        self.tls = tls
        self._listener = listener
        self._server = server
        self._limit = limit
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Closes the socket, and ends the handshakes. Other connections are the server's."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("the web page can't accept a connection: %s", error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._handshakes) + len(self._server.connections) >= self._limit:
                connection.close()
                continue
            task = loop.create_task(self._begin(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _begin(self, connection: socket.socket) -> None:
        """Makes the TLS handshake, after which the server has the connection."""
        loop = asyncio.get_running_loop()
        limit_s = HANDSHAKE_LIMIT_S if self.tls is not None else None
        try:
            await loop.connect_accepted_socket(
                self._protocol, connection, ssl=self.tls, ssl_handshake_timeout=limit_s
            )
        except OSError as error:  # ssl.SSLError is an OSError
            logger.debug("a connection to the web page ended early: %s", error)
            connection.close()

    def _protocol(self) -> asyncio.Protocol:
        return _Protocol(
            self._server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's runner passes it too: no log
        )


@final
class _Protocol(web.RequestHandler):
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
