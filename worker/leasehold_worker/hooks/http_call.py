"""One HTTP request with a deadline and a bounded answer.

It is HTTP/1.1 by http.client in a thread, which needs no further library and reads what real servers send.
Redirects are not followed: a hook names its address, and otherwise a server of the host could send the worker
to any other.
"""

import contextlib
import dataclasses
import http.client
import math
import socket
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec
import trio

from leasehold_worker.hooks.context import HookFailedError
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.process_readings import user_threads
from leasehold_worker.programs.user_files import UserFileError, connect_as

MOST_ANSWER_BYTES: Final = 1024 * 1024
"""Bytes read of an answer. SGLang sends all its settings in one: tens of kilobytes."""

FIELD_ANSWER_BYTES: Final = 16 * 1024
"""Bound of answers whose fields are read, except SGLang's settings. Other routes send less than 1 KiB.

The event loop reads the fields, and some routes are queried several times a second.
"""

HIDDEN: Final = "[credential]"
"""Text in place of a token that a server repeats."""

_SHOWN: Final = 300
_EXCERPT_BYTES: Final = 2048
"""Beginning of a server's text that messages are made of."""

_NO_DEADLINE_S: Final = 30.0
HTTP: Final = "http"
"""Kind of the threads of calls. Servers that hang block no reads of NVML or the disk, and no other user."""

USER_CALLS: Final = 32
"""Calls for one Unix user at once. More wait."""


class HttpCallError(Exception):
    """No answer came; the text has the reason."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's answer.

    Attributes:
        status: The status code.
        body: The body, cut at :data:`MOST_ANSWER_BYTES`.
        token: Token of the request, which the text of the answer never shows.
    """

    status: int
    body: bytes
    token: str = dataclasses.field(default="", repr=False)

    @property
    def good(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    def field(self, name: str, most_bytes: int = FIELD_ANSWER_BYTES) -> bool | str | None:
        """A field of a body that is a JSON object. None: it has no such field, or neither text nor a boolean.

        Raises:
            HookFailedError: The body has most_bytes or more.
        """
        if len(self.body) >= most_bytes:
            raise HookFailedError(
                f"the server's answer has at least {len(self.body)} bytes, and {name} is read from answers "
                f"of less than {most_bytes} bytes: check which server listens at the hook's url"
            )
        try:
            value: bool | str | None = getattr(_decoder(name).decode(self.body), name)
        except (ValueError, RecursionError):
            return None
        return value

    def __str__(self) -> str:
        text = _shown(self.body, self.token)
        return f"{self.status}: {text}" if text else str(self.status)


@cache
def _decoder(name: str) -> msgspec.json.Decoder[msgspec.Struct]:
    """Decodes one field only. Python objects of all the others would block the event loop."""
    return msgspec.json.Decoder(msgspec.defstruct("Answer", [(name, bool | str | None, None)]))


def printable(text: str) -> str:
    """Another program's text as one line, without control characters."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _told(error: Exception, token: str) -> str:
    return _shown(str(error).encode(errors="replace"), token) or type(error).__name__


def _shown(said: bytes, token: str) -> str:
    """The beginning of a server's text as one line, without the token of the request."""
    excerpt = said[: _EXCERPT_BYTES + len(token)]
    text = excerpt.decode(errors="replace")
    text = text.replace(token, HIDDEN) if token else text
    if token and len(excerpt) < len(said):
        text = text[: -len(token)]  # the beginning of a token may be at the end
    line = printable(text)
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"


def check_url(url: str) -> SplitResult:
    """The parts of a valid address.

    Raises:
        ValueError: The address is invalid; the text has the reason.
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
        raise ValueError("it has a space, a control character or a non-ASCII one: percent-encode it")
    return parts


async def call(
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    token: str | None = None,
    account: Account | None = None,
) -> HttpAnswer:
    """Makes a request, within the deadline of the caller's cancel scope.

    A body is sent as JSON. A token is sent as "Authorization: Bearer".

    With an account, a child that has become this Unix user connects.

    A cancellation breaks the connection, and the server may or may not have acted.

    Raises:
        HttpCallError: No whole answer came: refused, reset, not HTTP, or no address.
    """
    parts = check_url(url)
    remaining_s = trio.current_effective_deadline() - trio.current_time()
    # The cancel scope is the deadline. The socket's longer timeout only ends an abandoned thread.
    socket_timeout_s = _NO_DEADLINE_S if math.isinf(remaining_s) else max(remaining_s, 0.0) + 1.0
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=socket_timeout_s)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Connection": "close", "User-Agent": "leasehold", "Accept": "*/*"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    if account is not None:
        try:
            connection.sock = await connect_as(
                account, parts.hostname or "", parts.port or http.client.HTTP_PORT, socket_timeout_s
            )
        except UserFileError as error:
            raise HttpCallError(_told(error, token or "")) from None
    given_up = threading.Event()
    exchange = partial(_exchange, connection, method, target, body, headers, given_up)
    try:
        with user_threads(account.uid if account is not None else None, HTTP, USER_CALLS) as limiter:
            answer = await trio.to_thread.run_sync(exchange, abandon_on_cancel=True, limiter=limiter)
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
        if connection.sock is None:
            connection.connect()
        if given_up.is_set():  # the call was cancelled: a late request could take effect after the rollback
            raise ConnectionAbortedError("the call was cancelled while it connected")
        connection.request(method, target, body, headers)
        with connection.getresponse() as response:
            return HttpAnswer(response.status, response.read(MOST_ANSWER_BYTES))
    finally:
        connection.close()


def _break(connection: http.client.HTTPConnection) -> None:
    """Ends the read of an abandoned thread, which would last as long as the server sends bytes."""
    held = connection.sock
    if held is not None:
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)
