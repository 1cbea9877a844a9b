"""The asynchronous connection to a coordinator: calls, lists and streams."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, final

import grpc

from leasehold_client.aio.retry import repeat
from leasehold_client.coordinator.channels import Credentials, certificate_file, find_credentials
from leasehold_client.coordinator.connection import (
    CALL_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    ON_BEHALF_OF_KEY,
    OPTIONS,
    PAGE_LIMIT,
    PAGE_SIZE,
    call_error,
    find_coordinator,
    maybe_stored,
    too_many_pages,
)
from leasehold_client.coordinator.renewing_channel import RenewedContext
from leasehold_client.coordinator.trace_interceptor import trace_interceptors
from leasehold_client.errors import LeaseholdError, NoCoordinatorError

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

    Files and renewals are read and made in threads, so that no call blocks the loop.

    Args:
        address: As of :class:`leasehold_client.coordinator.connection.Connection`.
        on_wait: Called before each wait for another attempt, with the error that is waited out.
        context: As of :class:`leasehold_client.coordinator.connection.Connection`.
        on_behalf_of: The user for whom a service acts, such as ``user/alice``. Empty: the caller itself.
    """

    def __init__(
        self,
        address: str | None,
        on_wait: Callable[[LeaseholdError], None],
        context: str | None,
        on_behalf_of: str,
    ) -> None:
        self.address = address or ""
        """Address of the coordinator. Empty: this user's coordinator, before the first call."""
        self._on_wait = on_wait
        self._context_name = context
        self._on_behalf_of = on_behalf_of
        self._lock = asyncio.Lock()
        self._channels: list[grpc.aio.Channel] = []
        """The present channel, and before it those whose calls may not have ended."""
        self._context: RenewedContext | None = None
        self._token: Callable[[], str] | None = None
        self._certificate: Path | None = None
        late: object = _LateChannel(lambda: self._channels[-1])  # has what stubs use
        self.channel = cast("grpc.aio.Channel", late)

    async def close(self) -> None:
        """Closes the channel within a second, which ends its calls."""
        for channel in self._channels:
            with suppress(TimeoutError):
                await asyncio.wait_for(channel.close(), CLOSE_TIMEOUT_S)

    async def once(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes a call once."""
        metadata = await self._ready()
        try:
            return await method(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise await self._call_error(error) from None  # the gRPC error adds nothing

    async def read(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        """Makes an idempotent call, and repeats the call while its errors are transient."""
        return await repeat(partial(self.once, method, request, timeout_s), self._on_wait)

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
        page_size: int = PAGE_SIZE,
    ) -> AsyncGenerator[Page]:
        """Yields every page of a list, each when the iteration reaches it.

        A page may be empty although others follow, if few entries match the filter.

        Raises:
            LeaseholdError: The list has more than 1000 pages.
        """
        request.page_size = page_size
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
        """Makes a call, yields its responses, and cancels the call when the iteration ends."""
        metadata = await self._ready()
        call = method(request, timeout=timeout_s, metadata=metadata)
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise await self._call_error(error) from None
        finally:
            call.cancel()

    async def _ready(self) -> tuple[tuple[str, str], ...]:
        """Opens the channel, or renews its certificate if that is due. Returns the metadata of a call."""
        async with self._lock:
            if not self._channels:
                self._channels.append(await self._open())
            elif self._context is not None and await asyncio.to_thread(self._context.renew_if_due):
                tls = self._context.credentials()
                self._channels.append(await self._secure_channel(self.address, tls))
        headers = []
        if self._token is not None:
            headers.append(("authorization", f"Bearer {await asyncio.to_thread(self._token)}"))
        if self._on_behalf_of:
            headers.append((ON_BEHALF_OF_KEY, self._on_behalf_of))
        return tuple(headers)

    async def _open(self) -> grpc.aio.Channel:
        target, tls, self._token = await asyncio.to_thread(self._find)
        if tls is None:
            interceptors = await asyncio.to_thread(trace_interceptors)
            return grpc.aio.insecure_channel(target, options=OPTIONS, interceptors=interceptors)
        return await self._secure_channel(target, tls)

    async def _secure_channel(self, target: str, tls: grpc.ChannelCredentials) -> grpc.aio.Channel:
        interceptors = await asyncio.to_thread(trace_interceptors)  # the first one imports OpenTelemetry
        return grpc.aio.secure_channel(target, tls, options=OPTIONS, interceptors=interceptors)

    def _find(self) -> Credentials:
        self.address, context = find_coordinator(self.address or None, self._context_name)
        if context is not None:
            self._context = RenewedContext(context)
            return Credentials(self.address, self._context.credentials())
        self._certificate = certificate_file()
        return find_credentials(self.address)

    async def _call_error(self, error: grpc.RpcError) -> LeaseholdError:
        return await asyncio.to_thread(call_error, error, self.address, self._certificate)


@final
class _LateChannel:
    """Methods of stubs, each call of which uses the channel of that moment."""

    def __init__(self, present: Callable[[], grpc.aio.Channel]) -> None:
        self._present = present

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """A unary method."""
        return lambda *call, **options: self._present().unary_unary(*arguments, **named)(*call, **options)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """A method with a response stream."""
        return lambda *call, **options: self._present().unary_stream(*arguments, **named)(*call, **options)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """A method with both streams, which no stub of the client calls."""
        return lambda *call, **options: self._present().stream_stream(*arguments, **named)(*call, **options)
