"""The port for metrics: HTTP/1.1, one request per connection; off loopback TLS with client certificates."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, final

import trio
from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from leasehold_worker import metrics
from leasehold_worker.local_api.metrics_request import (
    HEAD_LIMIT_BYTES,
    HttpError,
    answer,
    parse_head,
    refusal,
)
from leasehold_worker.local_api.metrics_tls import MetricsTls
from leasehold_worker.local_api.tcp_listeners import open_listeners
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 16
"""Most connections at once. A further one ends the oldest, so that silent ones keep no scrape out."""

REQUEST_TIMEOUT_S: Final = 10.0
"""Time for the handshake, the request and the answer."""

READ_BYTES: Final = 4_096


@final
class MetricsPort:
    """Answers scrapes.

    Args:
        gauges: Reads the gauges, in trio's thread and without waiting.
        tls: The certificate and the authorities of clients, by now. None: no TLS.
    """

    def __init__(self, gauges: Callable[[], Sequence[Metric]], tls: MetricsTls | None) -> None:
        self._gauges = gauges
        self._tls = tls
        self._encoder = trio.CapacityLimiter(1)
        """Answers are encoded one at a time, and not by the threads that the journal needs."""
        self._connections: dict[trio.CancelScope, None] = {}
        """Scopes of the connections, oldest first."""

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answers one request of a connection, and ends the connection."""
        if len(self._connections) >= CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]  # it may go on in a thread for a moment
            oldest.cancel()
        with trio.move_on_after(REQUEST_TIMEOUT_S) as scope:
            self._connections[scope] = None
            try:
                await self._serve(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                logger.debug("a connection for metrics ended early")
            except OSError as error:
                logger.warning("a scrape failed: %s", error)
            except Exception:  # a defect, which must not end the worker
                logger.exception("a scrape failed because of a defect")
            finally:
                self._connections.pop(scope, None)
                await trio.aclose_forcefully(stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self._tls is None:
            await self._answer(stream)
            return
        encrypted = trio.SSLStream(stream, self._tls.context, server_side=True, https_compatible=True)
        await encrypted.do_handshake()
        await self._answer(encrypted)
        await encrypted.aclose()

    async def _answer(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        try:
            request = parse_head(await _head(stream))
        except HttpError as error:
            await stream.send_all(refusal(error))
            return
        encode, content_type = _OPENMETRICS if request.is_openmetrics else _TEXT
        families = _Families([*self._gauges()])
        body = await run_in_thread(encode, families, limiter=self._encoder)
        await stream.send_all(answer(HTTPStatus.OK, content_type, body, is_head=request.is_head))
        if isinstance(stream, trio.SocketStream):
            await stream.send_eof()


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


async def _head(stream: trio.abc.ReceiveStream) -> bytes:
    """The request line and the headers.

    Raises:
        HttpError: They are too long, or incomplete.
    """
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) > HEAD_LIMIT_BYTES:
            raise HttpError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request has more than {HEAD_LIMIT_BYTES} bytes: send fewer headers",
            )
        more = await stream.receive_some(READ_BYTES)
        if not more:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the request is incomplete")
        received += more
    return received.partition(b"\r\n\r\n")[0]


@asynccontextmanager
async def serve_metrics(
    address: str, tls: MetricsTls | None, gauges: Callable[[], Sequence[Metric]]
) -> AsyncIterator[None]:
    """Serves metrics in the context.

    Args:
        address: HOST:PORT. Empty: there is no port.
        tls: As of :class:`MetricsPort`.
        gauges: Likewise.

    Raises:
        StartError: The address can't be used.
    """
    if not address:
        yield
        return
    listeners = await open_listeners(address, "metrics", "--metrics-listen", CONNECTIONS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, MetricsPort(gauges, tls).serve, listeners)
        if tls is not None:
            nursery.start_soon(tls.run)
        found = listeners[0].socket.getsockname()[1]
        scheme = "http" if tls is None else "https"
        logger.info("listening on %s for metrics", f"{scheme}://{address.rpartition(':')[0]}:{found}")
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
