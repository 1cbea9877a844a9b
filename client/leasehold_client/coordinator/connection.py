"""The connection to a coordinator: calls, lists and streams that raise :class:`LeaseholdError`."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol, TypeVar, cast, final

import grpc

from leasehold_client import __version__, tracing
from leasehold_client.contexts import Context
from leasehold_client.coordinator.channels import certificate_file, open_channel, require_no_token
from leasehold_client.coordinator.header_interceptor import HeaderInterceptor
from leasehold_client.coordinator.renewing_channel import RenewingChannel
from leasehold_client.coordinator.retry import CONNECT_TIMEOUT_S, repeat
from leasehold_client.coordinator.tls_failures import explain, explain_closed
from leasehold_client.coordinator.trace_interceptor import TraceInterceptor
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, decode_error

CALL_TIMEOUT_S: Final = 10.0
"""Deadline of most calls."""

ON_BEHALF_OF_KEY: Final = "leasehold-on-behalf-of"
"""Metadata of a call with the user for whom a service acts."""

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
        address: HOST:PORT or insecure:HOST:PORT of the coordinator, or unix:PATH of its socket.
        on_wait: Called before each wait for another attempt, with the error that is waited out.
        context: The client certificate. None: a token, or the user of a socket.
        on_behalf_of: The user for whom a service acts, such as ``user/alice``. Empty: the caller itself.

    Raises:
        LeaseholdError: There are no credentials for the coordinator.
    """

    def __init__(
        self,
        address: str,
        on_wait: Callable[[LeaseholdError], None] = lambda error: None,
        context: Context | None = None,
        on_behalf_of: str = "",
    ) -> None:
        self.address = address
        self._on_wait = on_wait
        self._certificate = certificate_file() if context is None else None
        self.channel: grpc.Channel
        if context is not None:
            require_no_token(f"the context {context.name} has a certificate")
            self.channel = RenewingChannel(context, address, OPTIONS)
        else:
            self.channel = repeat(partial(open_channel, address, OPTIONS), on_wait)
        if on_behalf_of:
            header = HeaderInterceptor(ON_BEHALF_OF_KEY, lambda: on_behalf_of)
            self.channel = grpc.intercept_channel(self.channel, header)
        tracing.open_tracing("leasehold-client", __version__)
        if tracing.is_on():
            self.channel = grpc.intercept_channel(self.channel, TraceInterceptor())

    def close(self) -> None:
        """Closes the channel within a second, even if gRPC hangs.

        An exception in a signal handler, such as KeyboardInterrupt, can leave a call open. `Channel.close`
        then waits for the call forever (grpc/grpc#19973).
        """
        closing = threading.Thread(target=self.channel.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Converts gRPC errors of the calls within the context."""
        try:
            yield
        except grpc.RpcError as error:
            details = cast("grpc.Call", error).details() or ""
            if (cause := explain_closed(details, self.address, self._certificate)) is not None:
                raise NoCoordinatorError(cause, code=grpc.StatusCode.UNAVAILABLE) from None
            failure = explain(details, self.address)
            if failure is not None:
                raise LeaseholdError(failure, code=grpc.StatusCode.UNAVAILABLE) from None
            raise decode_error(error, self.address) from None  # the gRPC error adds nothing

    def read(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a call that changes nothing."""
        return self.repeated(partial(method, request, timeout=timeout_s))

    def repeated(self, call: Callable[[], Response]) -> Response:
        """Makes an idempotent call, and repeats it while its errors are transient."""

        def attempt() -> Response:
            with self.decoded():
                return call()

        return repeat(attempt, self._on_wait)

    def create(self, call: Callable[[], Response]) -> Response:
        """Makes a creating call, and retries it with the same request_id if the response is lost."""
        try:
            return self.repeated(call)
        except NoCoordinatorError as error:
            raise NoCoordinatorError(
                f"{error.message}; the command may have been stored: `leasehold get commands` shows it",
                code=error.code,
            ) from None

    def pages(
        self,
        method: "grpc.UnaryUnaryMultiCallable[PageRequest, Page]",
        request: PageRequest,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[Page]:
        """Yields every page of a list, each when the iteration reaches it.

        A page may be empty although others follow, if few entries match the filter.

        Raises:
            LeaseholdError: The list has more than 1000 pages.
        """
        request.page_size = page_size
        for _ in range(PAGE_LIMIT):
            page = self.read(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
        raise LeaseholdError(
            f"the list of {self.address} has more than {PAGE_LIMIT} pages: narrow the request"
        )

    def stream(self, call: "grpc._CallIterator[Response]") -> Generator[Response]:
        """Yields the responses of a call, and cancels the call when the iteration ends."""
        try:
            with self.decoded():
                yield from call
        finally:
            call.cancel()
