"""The connection to a coordinator: calls, lists and streams that raise :class:`LeaseholdError`."""

import os
import re
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast, final

import grpc

from leasehold_client.config import COORDINATOR_VARIABLE, configured_coordinator, parse_address
from leasehold_client.contexts import Context, environment_context, find_context
from leasehold_client.coordinator.channels import certificate_file, open_channel, require_no_token
from leasehold_client.coordinator.header_interceptor import HeaderInterceptor
from leasehold_client.coordinator.open_streams import OpenStreams
from leasehold_client.coordinator.renewing_channel import RenewedContext, RenewingChannel
from leasehold_client.coordinator.retry import CONNECT_TIMEOUT_S, is_unsent, repeat
from leasehold_client.coordinator.stream_limit import StreamLimit
from leasehold_client.coordinator.tls_failures import explain, explain_closed
from leasehold_client.coordinator.trace_interceptor import traced
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError, decode_error

CALL_TIMEOUT_S: Final = 10.0
"""Deadline of most calls."""

READS: Final = ("Get", "List", "Plan", "VerifyAudit", "WhoAmI")
"""Beginnings of the names of requests that change nothing."""

ON_BEHALF_OF_KEY: Final = "leasehold-on-behalf-of"
"""Metadata of a call with the user for whom a service acts."""

_USER: Final = re.compile(r"user/[A-Za-z0-9._@-]{1,64}")

CLOSED: Final = "this client is closed: make another one"
CLOSE_TIMEOUT_S: Final = 1.0
PAGE_SIZE: Final = 1000
PAGE_LIMIT: Final = 1_000
"""Pages of one list. A page has up to 1000 items and 3.5 MB."""

OPTIONS: Final[list[tuple[str, int]]] = [
    # A restarted coordinator is reached again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # gRPC uses this as the timeout of one connection attempt. A distant or busy coordinator needs some time.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # Each client has a connection of its own, and with it all places of calls.
    ("grpc.use_local_subchannel_pool", 1),
]


class _PageRequest(Protocol):
    page_size: int
    page_token: str


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


Request = TypeVar("Request")
Response = TypeVar("Response")
PageRequest = TypeVar("PageRequest", bound=_PageRequest)
Page = TypeVar("Page", bound=_Page)


@final
class Connection:
    """A channel to one coordinator. Refusals are raised as :class:`LeaseholdError`.

    Args:
        address: HOST:PORT or insecure:HOST:PORT of the coordinator, or unix:PATH of its socket. None: that of
            the context, or of LEASEHOLD_COORDINATOR, or of cli.toml, or else this user's coordinator.
        on_wait: Called before each wait for another attempt, with the error that is waited out.
        context: Name of a context of ``leasehold login``. None: without an address, that of LEASEHOLD_CONTEXT
            or the current context.
        on_behalf_of: The user for whom a service acts, such as ``user/alice``. Empty: the caller itself.

    Attributes:
        has_changed: Whether the coordinator has accepted a request for a change.

    Raises:
        LeaseholdError: There are no credentials for the coordinator.
        UsageError: An argument, or a file of the credentials, is invalid.
    """

    def __init__(
        self,
        address: str | None,
        on_wait: Callable[[LeaseholdError], None] = lambda error: None,
        context: str | None = None,
        on_behalf_of: str = "",
    ) -> None:
        self.address, found = find_coordinator(address, context)
        self._on_wait = on_wait
        self._is_closed = False
        self.streams = OpenStreams()
        """The places of watches, waits and outputs. Each holds a place around its calls of :meth:`stream`."""
        self.has_changed = False
        self._certificate = certificate_file(self.address) if found is None else None
        self._renewed = RenewedContext(found) if found is not None else None
        self.channel: grpc.Channel
        if self._renewed is not None:
            self.channel = RenewingChannel(self._renewed, self.address, OPTIONS)
        else:
            self.channel = repeat(partial(open_channel, self.address, OPTIONS), on_wait)
        if on_behalf_of:
            require_user(on_behalf_of)
            header = HeaderInterceptor(ON_BEHALF_OF_KEY, lambda: on_behalf_of)
            self.channel = grpc.intercept_channel(self.channel, header)
        self.channel = traced(self.channel)

    def close(self) -> None:
        """Closes the channel within a second, even if gRPC hangs.

        An exception in a signal handler, such as KeyboardInterrupt, can leave a call open. `Channel.close`
        then waits for the call forever (grpc/grpc#19973).
        """
        self._is_closed = True
        closing = threading.Thread(target=self.channel.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def once(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a call once."""
        with self._converted():
            response = method(request, timeout=timeout_s)
        self.has_changed |= is_change(request)
        return response

    def read(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes an idempotent call, and repeats the call while its errors are transient."""
        return repeat(partial(self.once, method, request, timeout_s), self._on_wait)

    def change(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a call that is not idempotent, and repeats the call only if it has reached no coordinator."""
        return repeat(partial(self.once, method, request, timeout_s), self._on_wait, is_unsent)

    def create(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a creating call, and retries it with the same request_id if the response is lost."""
        try:
            return self.read(method, request, timeout_s)
        except NoCoordinatorError as error:
            raise maybe_stored(error) from None

    def pages(
        self,
        method: "grpc.UnaryUnaryMultiCallable[PageRequest, Page]",
        request: PageRequest,
    ) -> Generator[Page]:
        """Yields every page of a list, each when the iteration reaches it.

        A page has up to 1000 entries if the request has no size. A page may be empty although others follow,
        if few entries match the filter.

        Raises:
            LeaseholdError: The list has more than 1000 pages.
        """
        request.page_size = request.page_size or PAGE_SIZE
        for _ in range(PAGE_LIMIT):
            page = self.read(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
        raise too_many_pages(self.address)

    def stream(
        self,
        method: "grpc.UnaryStreamMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float | None = None,
    ) -> Generator[Response]:
        """Makes a call, yields its responses, and cancels the call when the iteration ends.

        Raises:
            RenewalDueError: The certificate of the stream is to be renewed. The error is transient.
        """
        opened = self._renewed.present() if self._renewed is not None else None
        limit = StreamLimit(self._renewed, opened, timeout_s)
        try:
            with self._converted():
                call = method(request, timeout=limit.timeout_s)
                try:
                    yield from call
                finally:
                    call.cancel()
        except LeaseholdError as error:
            raise limit.error(error) from None

    @contextmanager
    def _converted(self) -> Iterator[None]:
        """Converts errors of a call within the context. A closed client is refused.

        A call on a closed channel may end the process by SIGSEGV (gRPC 1.85.1). If another thread closes the
        channel at this moment, gRPC raises ValueError.
        """
        if self._is_closed:
            raise UsageError(CLOSED)
        try:
            yield
        except (grpc.RpcError, ValueError) as error:
            if self._is_closed:
                raise UsageError(CLOSED) from None
            if not isinstance(error, grpc.RpcError):
                raise
            raise call_error(error, self.address, self._certificate) from None  # the gRPC error adds nothing


def is_change(request: object) -> bool:
    """Whether a request is for a change, by its name."""
    return not type(request).__name__.startswith(READS)


def require_user(on_behalf_of: str) -> None:
    """Refuses a user that no header can carry. The coordinator checks the rest.

    Raises:
        UsageError: The text is no identity of a user.
    """
    if not _USER.fullmatch(on_behalf_of):
        raise UsageError(
            f"a service acts for a user, and {on_behalf_of[:100]!r} is none: write user/NAME, where NAME has "
            "letters, digits, '-', '_', '.' or '@', at most 64"
        )


def find_coordinator(address: str | None, context: str | None) -> tuple[str, Context | None]:
    """The address of a coordinator, and the context whose certificate it knows.

    Args:
        address: As of :class:`Connection`.
        context: As of :class:`Connection`.

    Returns:
        The address, and the context. None: the credentials are a token, or the user of a socket.

    Raises:
        UsageError: The address or cli.toml is invalid, or there is no such context.
    """
    if not address and not context:
        address = os.environ.get(COORDINATOR_VARIABLE)
        context = environment_context(address)
    address = parse_address(address) if address else None
    found = find_context(context, address)
    if found is not None:
        require_no_token(f"the context {found.name} has a certificate")
        return address or found.coordinator, found
    return address or configured_coordinator(), None


def call_error(error: grpc.RpcError, address: str, certificate: Path | None) -> LeaseholdError:
    """Converts the error of a call. Blocks for up to 4 s if a certificate has expired.

    Args:
        error: The error.
        address: The address of the call.
        certificate: The file with the client's certificate. None: the client has presented none of a file.
    """
    details = cast("grpc.Call", error).details() or ""
    if (cause := explain_closed(details, address, certificate)) is not None:
        return NoCoordinatorError(cause, code=grpc.StatusCode.UNAVAILABLE)
    if (failure := explain(details, address)) is not None:
        return LeaseholdError(failure, code=grpc.StatusCode.UNAVAILABLE)
    return decode_error(error, address)


def maybe_stored(error: NoCoordinatorError) -> NoCoordinatorError:
    """The error of a creating call without an answer."""
    if not error.is_sent:
        return error
    return NoCoordinatorError(
        f"{error.message}; the command may have been stored: `leasehold get commands` shows it",
        code=error.code,
    )


def too_many_pages(address: str) -> LeaseholdError:
    """The error of a list that does not end."""
    return LeaseholdError(f"the list of {address} has more than {PAGE_LIMIT} pages: narrow the request")
