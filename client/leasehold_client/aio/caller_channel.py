"""A channel of asyncio with this user's credentials."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, final

import grpc

from leasehold_client.contexts import Context
from leasehold_client.coordinator.channels import Credentials, certificate_file, find_credentials
from leasehold_client.coordinator.connection import (
    CLOSE_TIMEOUT_S,
    CLOSED,
    ON_BEHALF_OF_KEY,
    OPTIONS,
    find_coordinator,
    require_user,
)
from leasehold_client.coordinator.renewing_channel import RenewedContext, context_credentials
from leasehold_client.coordinator.stream_limit import StreamLimit
from leasehold_client.coordinator.trace_interceptor import trace_interceptors
from leasehold_client.errors import UsageError

Metadata: TypeAlias = tuple[tuple[str, str], ...]


@final
class CallerChannel:
    """A channel that the first call opens. Files are read, and certificates renewed, in threads.

    Args:
        address: As of :class:`leasehold_client.coordinator.connection.Connection`.
        context: As of :class:`leasehold_client.coordinator.connection.Connection`.
        on_behalf_of: The user for whom a service acts, such as ``user/alice``. Empty: the caller itself.
    """

    def __init__(self, address: str | None, context: str | None, on_behalf_of: str) -> None:
        self.address = address or ""
        """Address of the coordinator. Empty: this user's coordinator, before the first call."""
        self.certificate: Path | None = None
        """The file with the client certificate of a PKI of others. None: there is none."""
        self._given_address = address
        self._context_name = context
        self._on_behalf_of = on_behalf_of
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._channels: list[grpc.aio.Channel] = []
        """The present channel, and before it those whose calls may not have ended."""
        self._context: RenewedContext | None = None
        self._opened: Context | None = None
        """The context of the present channel. None: there is no channel, or it has no context."""
        self._token: Callable[[], str] | None = None

    @property
    def current(self) -> grpc.aio.Channel:
        """The channel of the last :meth:`present`."""
        return self._channels[-1]

    def limit(self, timeout_s: float | None) -> StreamLimit:
        """The deadline of a stream on the channel of the last :meth:`present`."""
        return StreamLimit(self._context, self._opened, timeout_s)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    async def present(self) -> tuple[grpc.aio.Channel, Metadata]:
        """The channel for the next call, and the metadata of this call.

        A renewal goes on if this is cancelled, and the next call opens a channel with the new certificate.

        Raises:
            LeaseholdError: There are no credentials for the coordinator, a file can't be read or is
                malformed, an argument of the client is invalid, or the client is closed.
        """
        async with self._lock:
            self._require_open()
            if not self._channels:
                await self._keep(await self._open())
            elif self._context is not None:
                context = await asyncio.to_thread(self._context.present)
                if context is not self._opened:
                    await self._keep(await self._open_to(self.address, context_credentials(context)))
                    self._opened = context
        headers = []
        if self._token is not None:
            headers.append(("authorization", f"Bearer {await asyncio.to_thread(self._token)}"))
        if self._on_behalf_of:
            headers.append((ON_BEHALF_OF_KEY, self._on_behalf_of))
        self._require_open()
        return self.current, tuple(headers)

    async def close(self) -> None:
        """Closes the channel within a second, which ends its calls."""
        self._is_closed = True
        for channel in self._channels:
            with suppress(TimeoutError):
                await asyncio.wait_for(channel.close(), CLOSE_TIMEOUT_S)

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError(CLOSED)

    async def _keep(self, channel: grpc.aio.Channel) -> None:
        """Makes a new channel the present one, unless the client was closed meanwhile."""
        if self._is_closed:
            await channel.close()
        self._require_open()
        self._channels.append(channel)

    async def _open(self) -> grpc.aio.Channel:
        target, tls, self._token = await asyncio.to_thread(self._find)
        return await self._open_to(target, tls)

    async def _open_to(self, target: str, tls: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        interceptors = await asyncio.to_thread(trace_interceptors)  # the first one imports OpenTelemetry
        if tls is None:
            return grpc.aio.insecure_channel(target, options=OPTIONS, interceptors=interceptors)
        return grpc.aio.secure_channel(target, tls, options=OPTIONS, interceptors=interceptors)

    def _find(self) -> Credentials:
        if self._on_behalf_of:
            require_user(self._on_behalf_of)
        self.address, context = find_coordinator(self._given_address, self._context_name)
        if context is not None:
            self._context = RenewedContext(context)
            self._opened = self._context.present()
            return Credentials(self.address, context_credentials(self._opened))
        self.certificate = certificate_file(self.address)
        return find_credentials(self.address)
