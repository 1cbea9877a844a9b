"""The keys of an OpenID Connect issuer in memory, read again from their file or URL."""

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO, Any, Final, final
from urllib.parse import urlsplit

from leasehold_coordinator.access.bearer_tokens import OidcSettings
from leasehold_coordinator.access.json_web_keys import SigningKey, parse_keys
from leasehold_coordinator.errors import StartError

logger = logging.getLogger(__name__)

DOCUMENT_LIMIT_BYTES: Final = 262_144
FETCH_TIMEOUT_S: Final = 10.0
"""How long a fetch may take in all."""

READ_TIMEOUT_S: Final = 5.0
"""How long the server of a URL may send nothing."""

PIECE_BYTES: Final = 16_384
LEAST_INTERVAL_S: Final = 60.0
"""Time between two fetches, whoever asks for them."""

URL_INTERVAL_S: Final = 3_600.0
FILE_INTERVAL_S: Final = 10.0
"""Time between two reads if nobody asks, after which a removed key is no longer accepted."""


@final
class KeySource:
    """The newest keys.

    Args:
        load: Reads the document. It is called in a thread. Raises OSError or ValueError.
        interval_s: Time between two reads if nobody asks.
        least_interval_s: Time between two reads in any case.
    """

    def __init__(
        self, load: Callable[[], bytes], interval_s: float, least_interval_s: float = LEAST_INTERVAL_S
    ) -> None:
        self.keys: Mapping[str, SigningKey] = {}
        """The keys by their ids. Each read replaces the mapping. Empty until the first read has succeeded."""
        self._load = load
        self._interval_s = interval_s
        self._least_interval_s = min(interval_s, least_interval_s)
        self._read_time_s = float("-inf")
        self._is_reading = False
        self._asked = asyncio.Event()

    def ask(self) -> bool:
        """Asks for another read, since a key is missing.

        Returns:
            Whether a read is under way or begins now. False: the last one is too recent.
        """
        if not self._is_reading and time.monotonic() - self._read_time_s < self._least_interval_s:
            return False
        self._asked.set()
        return True

    async def run(self) -> None:
        """Reads at once, at intervals, and when asked. Never returns."""
        while True:
            self._asked.clear()
            await self._read()
            await asyncio.sleep(self._least_interval_s)
            try:
                async with asyncio.timeout(self._interval_s - self._least_interval_s):
                    await self._asked.wait()
            except TimeoutError:
                continue

    async def _read(self) -> None:
        self._is_reading = True
        try:
            keys = parse_keys(await asyncio.to_thread(self._load))
        except (OSError, ValueError, HTTPException) as error:
            logger.error(
                "the keys of the OpenID Connect issuer can't be read (%s); %d earlier ones stay",
                *(error, len(self.keys)),
            )
        except Exception:  # a defect must not end the coordinator
            logger.exception("the keys of the OpenID Connect issuer can't be read")
        else:
            if keys.keys() != self.keys.keys():
                logger.info("read %d keys of the OpenID Connect issuer", len(keys))
            self.keys = keys
        finally:
            self._is_reading = False
            self._read_time_s = time.monotonic()


def open_keys(settings: OidcSettings) -> KeySource:
    """The source of an issuer's keys. A file is read now, and a URL once the source runs.

    Raises:
        StartError: The file is no key set.
    """
    if settings.jwks_url:
        return KeySource(partial(fetch_keys, settings.jwks_url), URL_INTERVAL_S)
    path = Path(settings.jwks_file)
    source = KeySource(partial(read_key_file, path), FILE_INTERVAL_S)
    try:
        source.keys = parse_keys(read_key_file(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StartError(f"the keys in {path} can't be used ({why}): correct oidc.jwks_file") from error
    return source


def read_key_file(path: Path) -> bytes:
    """The content of a key file.

    Raises:
        OSError: It can't be read, or is not a regular file.
        ValueError: It is too large.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(DOCUMENT_LIMIT_BYTES + 1)
    _require_bounded(content)
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def fetch_keys(url: str) -> bytes:
    """The document at a URL. Blocks for the lookup of the host, FETCH_TIMEOUT_S and one read at most.

    Raises:
        OSError: The server can't be reached, refuses, redirects or is too slow.
        ValueError: The document is too large.
    """
    began = time.monotonic()
    connections = _Connections()
    opener = urllib.request.build_opener(_NoRedirects, _Plain(connections), _Encrypted(connections))
    request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - see check_url
    pieces = bytearray()
    with connections.ended_in_time(), opener.open(request, timeout=READ_TIMEOUT_S) as response:
        while piece := response.read1(PIECE_BYTES):
            pieces += piece
            _require_bounded(pieces)
            if time.monotonic() - began > FETCH_TIMEOUT_S:
                raise TimeoutError(f"{url} did not send its document within {FETCH_TIMEOUT_S:g} s")
    return bytes(pieces)


def check_url(url: str) -> None:
    """Refuses a URL from which anybody on the network path could serve keys.

    Raises:
        ValueError: The scheme is not https, or http on loopback.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not host or parts.scheme not in ("https", "http"):
        raise ValueError(f"{url!r} is no URL: write https://HOST/PATH")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ValueError(f"{url!r} has no TLS, so others could serve keys of their own: write https://")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_bounded(data: bytes | bytearray) -> None:
    if len(data) > DOCUMENT_LIMIT_BYTES:
        raise ValueError(f"it has more than {DOCUMENT_LIMIT_BYTES} bytes")


class _Connections:
    """The connections of one fetch. The timeout of a socket bounds each read, and not all together."""

    def __init__(self) -> None:
        self._made: list[HTTPConnection] = []

    @contextmanager
    def ended_in_time(self) -> Iterator[None]:
        """A context after whose time the connections end. Their reads fail."""
        timer = threading.Timer(FETCH_TIMEOUT_S, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def plain(self, host: str, **options: Any) -> HTTPConnection:
        """A connection without TLS."""
        self._made.append(HTTPConnection(host, **options))
        return self._made[-1]

    def encrypted(self, host: str, **options: Any) -> HTTPConnection:
        """A connection with TLS."""
        self._made.append(HTTPSConnection(host, **options))
        return self._made[-1]

    def _end(self) -> None:
        for one in self._made:
            with suppress(OSError):
                if (connected := one.sock) is not None:
                    connected.shutdown(socket.SHUT_RDWR)


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, connections: _Connections) -> None:
        super().__init__()
        self._connections = connections

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._connections.plain, req)


class _Encrypted(urllib.request.HTTPSHandler):
    def __init__(self, connections: _Connections) -> None:
        super().__init__()
        self._connections = connections

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._connections.encrypted, req, context=ssl.create_default_context())


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead to a URL without TLS."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """Follows no redirect: urllib raises the status as an HTTPError."""
