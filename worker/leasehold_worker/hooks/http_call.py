"""One HTTP request with a deadline, and its whole answer, which is bounded.

HTTP/1.1 by http.client in a thread: it keeps a library out, and reads what real servers send. Redirects are
not followed: a hook names the address that it means, and a server of the host could otherwise send the worker
anywhere.
"""

import contextlib
import dataclasses
import http.client
import json
import math
import socket
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from urllib.parse import SplitResult, urlsplit

import trio

MOST_ANSWER_BYTES: Final = 1024 * 1024
"""How much of an answer is read. SGLang tells all of its settings in one: tens of kilobytes."""

HIDDEN: Final = "[credential]"
"""What is told in place of a token that a server repeats."""

_SHOWN: Final = 300
_NO_DEADLINE_S: Final = 30.0
_THREADS: Final = trio.CapacityLimiter(32)
"""Of its own, so that servers that hang hold up nobody who reads NVML or the disk."""


class HttpCallError(Exception):
    """No answer came. Its text says why."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a server answered.

    Attributes:
        status: The status code.
        body: The body, cut at :data:`MOST_ANSWER_BYTES`.
        token: What the request carried, which the text of the answer never shows.
    """

    status: int
    body: bytes
    token: str = dataclasses.field(default="", repr=False)

    @property
    def good(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    def field(self, name: str) -> object:
        """A field of a body that is a JSON object. None: it has none."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return value.get(name) if isinstance(value, dict) else None

    def __str__(self) -> str:
        text = _without(self.token, printable(self.body.decode(errors="replace")))
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        return f"{self.status}: {shown}" if shown else str(self.status)


def printable(text: str) -> str:
    """What another program said, in one line and without characters that a terminal obeys."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _told(error: Exception, token: str) -> str:
    said = _without(token, printable(str(error)))
    return (said if len(said) <= _SHOWN else said[:_SHOWN] + "…") or type(error).__name__


def _without(token: str, text: str) -> str:
    return text.replace(token, HIDDEN) if token else text


def check_url(url: str) -> SplitResult:
    """The parts of an address that can be called.

    Raises:
        ValueError: It can't be called; the text says why.
    """
    parts = urlsplit(url)
    if parts.scheme == "https":
        raise ValueError("https is not supported: use http:// and a server of the worker's own host")
    if parts.scheme != "http":
        raise ValueError("it does not begin with http://")
    if not parts.hostname or parts.username is not None or parts.fragment:
        raise ValueError("it is not of the form http://HOST:PORT/PATH")
    if parts.port == 0:
        raise ValueError("its port is 0")
    if any(character <= " " or character == "\x7f" for character in url) or not url.isascii():
        raise ValueError("it has a blank, a control character or one beyond ASCII: percent-encode it")
    return parts


async def call(method: str, url: str, body: bytes | None = None, *, token: str | None = None) -> HttpAnswer:
    """Makes a request, within the deadline of the caller's cancel scope.

    A body is sent as JSON. A token is sent as "Authorization: Bearer".

    Cancelled: the connection is broken, and the server may or may not have done what was asked.

    Raises:
        HttpCallError: No whole answer came: refused, reset, not HTTP, or no address.
    """
    parts = check_url(url)
    remaining_s = trio.current_effective_deadline() - trio.current_time()
    # The cancel scope decides. The socket's timeout only ends the thread when nothing else did.
    socket_timeout_s = _NO_DEADLINE_S if math.isinf(remaining_s) else max(remaining_s, 0.0) + 1.0
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=socket_timeout_s)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Connection": "close", "User-Agent": "leasehold", "Accept": "*/*"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    given_up = threading.Event()
    exchange = partial(_exchange, connection, method, target, body, headers, given_up)
    try:
        answer = await trio.to_thread.run_sync(exchange, abandon_on_cancel=True, limiter=_THREADS)
    except (OSError, http.client.HTTPException) as error:
        raise HttpCallError(_told(error, token or "")) from None
    finally:
        given_up.set()
        _break(connection)
    return replace(answer, token=token or "")


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: bytes | None,
    headers: dict[str, str],
    given_up: threading.Event,
) -> HttpAnswer:
    try:
        connection.connect()
        if given_up.is_set():  # nobody waits any more, and what is asked might be done after it was undone
            raise ConnectionAbortedError("the call was cancelled while it connected")
        connection.request(method, target, body, headers)
        with connection.getresponse() as response:
            return HttpAnswer(response.status, response.read(MOST_ANSWER_BYTES))
    finally:
        connection.close()


def _break(connection: http.client.HTTPConnection) -> None:
    """Wakes a thread that was left behind: it would read on for as long as a server sends bytes."""
    held = connection.sock
    if held is not None:
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)
