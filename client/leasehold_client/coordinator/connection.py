"""The connection to a coordinator: calls, lists and streams whose errors are ours."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol, TypeVar, final

import grpc

from leasehold_client.coordinator.retry import CONNECT_TIMEOUT_S, repeat
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, decode_error

CLOSE_TIMEOUT_S: Final = 1.0
PAGE_LIMIT: Final = 1_000
"""Pages of one list. Each has a thousand items, or 3.5 MB of them."""


OPTIONS: Final[list[tuple[str, int]]] = [
    # A restarted coordinator is to be found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # In gRPC this is the time that one attempt to connect may take: a far or busy coordinator needs some.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
]

Response = TypeVar("Response")


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


Page = TypeVar("Page", bound=_Page)


@final
class Connection:
    """A channel to one coordinator. What it refuses is raised as :class:`LeaseholdError`.

    Args:
        address: HOST:PORT of the coordinator.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=OPTIONS)

    def close(self) -> None:
        """Closes it, within a second even where gRPC never finishes.

        An exception of a signal handler, such as KeyboardInterrupt, can leave a call behind that
        `Channel.close` waits for (grpc/grpc#19973).
        """
        closing = threading.Thread(target=self.channel.close, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Raises what a call within it is refused with."""
        try:
            yield
        except grpc.RpcError as error:
            raise decode_error(error, self.address) from error

    def repeated(self, call: Callable[[], Response], *, through_outages: bool = True) -> Response:
        """The answer of a call that is safe to repeat. One that was lost is asked for again."""

        def attempt() -> Response:
            with self.decoded():
                return call()

        return repeat(attempt, through_outages=through_outages)

    def create(self, call: Callable[[], Response]) -> Response:
        """The answer of a creating call. One that was lost is asked for again, by the same request_id."""
        try:
            return self.repeated(call)
        except NoCoordinatorError as error:
            raise NoCoordinatorError(
                f"{error.message}; what it stored before goes on: `leasehold get commands` shows it",
                code=error.code,
            ) from error

    def pages(self, read_page: Callable[[str], Page]) -> Iterator[Page]:
        """Every page of a list, given how one is read by its token.

        A page that the coordinator has no room for is asked for again.

        Raises:
            LeaseholdError: The list has no end.
        """
        token = ""
        for _ in range(PAGE_LIMIT):
            page = self.repeated(partial(read_page, token), through_outages=False)
            yield page
            if not (token := page.next_page_token):
                return
        raise LeaseholdError(f"a list of {self.address} has more than {PAGE_LIMIT} pages: ask for less of it")

    def stream(self, call: "grpc._CallIterator[Response]") -> Generator[Response]:
        """The responses of a call, which ends with the iteration."""
        try:
            with self.decoded():
                yield from call
        finally:
            call.cancel()
