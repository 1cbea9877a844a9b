"""The port for metrics: HTTP/1.1, one request per connection; off loopback TLS with client certificates."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Final, final

from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from leasehold_coordinator import metrics
from leasehold_coordinator.server.http_tls import HttpTls
from leasehold_coordinator.server.metrics_access import MetricsAccess
from leasehold_coordinator.server.metrics_request import (
    HEAD_LIMIT_BYTES,
    HttpError,
    answer,
    parse_head,
    refusal,
)
from leasehold_coordinator.server.ports import bind_port
from leasehold_coordinator.shared_runs import SharedRuns

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 16
"""Most connections at once. A further one ends the oldest, so that silent ones keep no scrape out."""

REQUEST_TIMEOUT_S: Final = 10.0
"""Time for the handshake, the request and the answer."""

REST: Final = 2.0
"""The rest after a scrape, as a multiple of its time. Scrapes at once share the next one."""

ACCEPT_PAUSE_S: Final = 0.1
"""Pause after a failed accept, such as one beyond the limit of open files."""


@final
class MetricsListener:
    """The server for metrics.

    Args:
        gauges: Reads the gauges.
        tls: TLS of the port. None: no TLS.
        access: Decides about the holders of certificates. Without TLS, nobody is asked.
    """

    def __init__(
        self, gauges: Callable[[], Awaitable[Sequence[Metric]]], tls: HttpTls | None, access: MetricsAccess
    ) -> None:
        self._gauges = gauges
        self._tls = tls
        self._access = access
        self._encoder = ThreadPoolExecutor(1, "metrics")
        """Encodes one answer at a time, of some MiB for a large fleet. An encoding goes on after the end of
        its connection, so encodings have a thread of their own."""
        self._scrapes = {kind: SharedRuns[bytes](REST) for _, kind in (_OPENMETRICS, _TEXT)}
        """By content type. A scrape of a large fleet takes half a second of a processor."""
        self._connections: dict[asyncio.Task[None], None] = {}
        """Tasks of the connections, oldest first."""

    async def run(self, listener: socket.socket) -> None:
        """Serves on a listening socket until cancelled, and closes it."""
        loop = asyncio.get_running_loop()
        with listener:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        connection, peer = await loop.sock_accept(listener)
                    except OSError as error:
                        logger.warning("no connection for metrics can be accepted: %s", error.strerror)
                        await asyncio.sleep(ACCEPT_PAUSE_S)
                        continue
                    if len(self._connections) >= CONNECTIONS:
                        next(iter(self._connections)).cancel()
                    task = tasks.create_task(self._serve(connection, str(peer[0])))
                    self._connections[task] = None
                    task.add_done_callback(self._connections.pop)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Answers one request of a connection, and ends the connection."""
        with connection:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await self._converse(connection, address)
            except (
                OSError,
                asyncio.IncompleteReadError,
                TimeoutError,
            ) as error:  # ssl.SSLError is an OSError
                logger.debug("a connection for metrics from %s ended early: %s", address, error)
            except Exception:  # a defect, which must not end the coordinator
                logger.exception("a scrape failed because of a defect")

    async def _converse(self, connection: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(HEAD_LIMIT_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        context = self._tls.context if self._tls is not None else None
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            writer.write(await self._answer(reader, writer, address))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        finally:
            transport.abort()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> bytes:
        try:
            self._admit(writer, address)
            request = parse_head(await _head(reader))
        except HttpError as error:
            return refusal(error)
        encode, content_type = _OPENMETRICS if request.is_openmetrics else _TEXT
        body = await self._scrapes[content_type].next(partial(self._scrape, encode))
        return answer(HTTPStatus.OK, content_type, body, is_head=request.is_head)

    async def _scrape(self, encode: Callable[[Collector], bytes]) -> bytes:
        families = _Families(await self._gauges())
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode, families)

    def _admit(self, writer: asyncio.StreamWriter, address: str) -> None:
        """Refuses holders of certificates that may not read metrics.

        Raises:
            HttpError: 403.
        """
        if self._tls is None:
            return
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if (why := self._access.refusal(der, address)) is not None:
            logger.warning("refused metrics to %s: %s", address, why)
            raise HttpError(HTTPStatus.FORBIDDEN, why)


_OPENMETRICS: Final = openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST
_TEXT: Final = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
"""Encoders, each with its content type. Those of other versions are never asked for."""


@final
class _Families(Collector):
    """The gauges that were read, and the counters of this process."""

    def __init__(self, gauges: Sequence[Metric]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._gauges
        yield from metrics.REGISTRY.collect()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The request line and the headers.

    Raises:
        HttpError: They are too long, or incomplete.
    """
    try:
        return (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise HttpError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request has more than {HEAD_LIMIT_BYTES} bytes: send fewer headers",
        ) from error
    except asyncio.IncompleteReadError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the request is incomplete") from error


def open_listener(address: str) -> tuple[socket.socket, str]:
    """A listening socket for metrics, and its address with a port number in the place of port 0.

    Raises:
        StartError: The address can't be used.
    """
    listener = bind_port(address, "--metrics-listen")
    listener.listen(CONNECTIONS)
    listener.setblocking(False)
    return listener, f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
