"""The asynchronous connection to a coordinator: calls, lists and streams."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast, final

import grpc

from leasehold_client.aio.caller_channel import CallerChannel
from leasehold_client.aio.retry import is_unsent, repeat
from leasehold_client.coordinator.connection import (
    CALL_TIMEOUT_S,
    CLOSED,
    PAGE_LIMIT,
    PAGE_SIZE,
    call_error,
    is_change,
    maybe_stored,
    too_many_pages,
)
from leasehold_client.coordinator.open_streams import OpenStreams
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError

__all__ = ["CALL_TIMEOUT_S", "PAGE_SIZE", "AsyncConnection"]


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
class AsyncConnection:
    """A channel to one coordinator, which is opened by the first call.

    Args:
        address: As of :class:`leasehold_client.coordinator.connection.Connection`.
        on_wait: Called before each wait for another attempt, with the error that is waited out.
        context: As of :class:`leasehold_client.coordinator.connection.Connection`.
        on_behalf_of: The user for whom a service acts, such as ``user/alice``. Empty: the caller itself.

    Attributes:
        has_changed: As of :class:`leasehold_client.coordinator.connection.Connection`.
    """

    def __init__(
        self,
        address: str | None,
        on_wait: Callable[[LeaseholdError], None],
        context: str | None,
        on_behalf_of: str,
    ) -> None:
        self._caller = CallerChannel(address, context, on_behalf_of)
        self._on_wait = on_wait
        self.streams = OpenStreams()
        """The places of watches, waits and outputs. Each holds a place around its calls of :meth:`stream`."""
        self.has_changed = False
        late: object = _LateChannel(self._caller)  # has what stubs use
        self.channel = cast("grpc.aio.Channel", late)

    @property
    def address(self) -> str:
        """Address of the coordinator. Empty: this user's coordinator, before the first call."""
        return self._caller.address

    async def close(self) -> None:
        """Closes the channel within a second, which ends its calls."""
        await self._caller.close()

    async def once(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a call once."""
        _, metadata = await self._caller.present()
        try:
            response = await method(request, timeout=timeout_s, metadata=metadata)
        except asyncio.CancelledError:
            self._refuse_if_closed()
            raise
        except grpc.RpcError as error:
            self._refuse_if_closed()
            raise await self._call_error(error) from None  # the gRPC error adds nothing
        self.has_changed |= is_change(request)
        return response

    async def read(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes an idempotent call, and repeats the call while its errors are transient."""
        return await repeat(partial(self.once, method, request, timeout_s), self._on_wait)

    async def change(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a call that is not idempotent, and repeats the call only if it has reached no coordinator."""
        return await repeat(partial(self.once, method, request, timeout_s), self._on_wait, is_unsent)

    async def create(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a creating call, and retries it with the same request_id if the response is lost."""
        try:
            return await self.read(method, request, timeout_s)
        except NoCoordinatorError as error:
            raise maybe_stored(error) from None

    async def pages(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[PageRequest, Page]",
        request: PageRequest,
    ) -> AsyncGenerator[Page]:
        """Yields every page of a list, each when the iteration reaches it.

        A page has up to 1000 entries if the request has no size. A page may be empty although others follow,
        if few entries match the filter.

        Raises:
            LeaseholdError: The list has more than 1000 pages.
        """
        request.page_size = request.page_size or PAGE_SIZE
        for _ in range(PAGE_LIMIT):
            page = await self.read(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
        raise too_many_pages(self.address)

    async def stream(
        self,
        method: "grpc.aio.UnaryStreamMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Response]:
        """Makes a call, yields its responses, and cancels the call when the iteration ends.

        Raises:
            RenewalDueError: The certificate of the stream is to be renewed. The error is transient.
        """
        _, metadata = await self._caller.present()
        limit = self._caller.limit(timeout_s)
        call = method(request, timeout=limit.timeout_s, metadata=metadata)
        try:
            async for response in call:
                yield response
        except asyncio.CancelledError:
            self._refuse_if_closed()
            raise
        except grpc.RpcError as error:
            self._refuse_if_closed()
            found = await self._call_error(error)
            raise await asyncio.to_thread(limit.error, found) from None
        finally:
            call.cancel()

    def _refuse_if_closed(self) -> None:
        """Tells a call that the close of its client has ended from one whose task is cancelled."""
        task = asyncio.current_task()
        if self._caller.is_closed and (task is None or not task.cancelling()):
            raise UsageError(CLOSED) from None

    async def _call_error(self, error: grpc.RpcError) -> LeaseholdError:
        return await asyncio.to_thread(call_error, error, self.address, self._caller.certificate)


@final
class _LateChannel:
    """Methods of stubs, each call of which uses the channel of that moment."""

    def __init__(self, caller: CallerChannel) -> None:
        self._caller = caller

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """A unary method."""
        return lambda *call, **options: self._caller.current.unary_unary(*arguments, **named)(
            *call, **options
        )

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """A method with a response stream."""
        return lambda *call, **options: self._caller.current.unary_stream(*arguments, **named)(
            *call, **options
        )

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """A method with both streams, which no stub of the client calls."""
        return lambda *call, **options: self._caller.current.stream_stream(*arguments, **named)(
            *call, **options
        )
