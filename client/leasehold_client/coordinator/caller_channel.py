"""The channel of a program that serves its user for long, on an event loop of asyncio."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final, final

import grpc

from leasehold_client.contexts import Context
from leasehold_client.coordinator.channels import find_parts, require_no_token
from leasehold_client.errors import LeaseholdError

logger = logging.getLogger(__name__)

RENEW_RETRY_S: Final = 60.0
"""Time between two attempts to renew a certificate."""


@final
class CallerChannel:
    """A channel with the credentials of this user, which are renewed and read again as verbs do.

    Args:
        address: The coordinator.
        context: The client certificate. None: a token, or the user of a socket.
        options: Settings of gRPC.
        metadata: Further metadata of each call.
    """

    def __init__(
        self,
        address: str,
        context: Context | None,
        options: Sequence[tuple[str, int]],
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._address = address
        self._context = context
        self._options = options
        self._metadata = metadata
        self._channel: grpc.aio.Channel | None = None
        self._token = None if context is not None else find_parts(address).token
        self._lock = asyncio.Lock()
        self._next_renewal_s = 0.0

    async def present(self) -> tuple[grpc.aio.Channel, tuple[tuple[str, str], ...]]:
        """The channel for the next call, and the metadata of this call.

        Raises:
            LeaseholdError: The credentials can't be read.
        """
        async with self._lock:
            if self._context is not None:
                await self._renew(self._context)
            if self._channel is None:
                target, credentials = await asyncio.to_thread(self._find)
                # On the loop's thread, since a channel of asyncio belongs to the loop.
                if credentials is None:
                    self._channel = grpc.aio.insecure_channel(target, options=self._options)
                else:
                    self._channel = grpc.aio.secure_channel(target, credentials, options=self._options)
        if self._token is None:
            return self._channel, self._metadata
        token = await asyncio.to_thread(self._token)
        return self._channel, (*self._metadata, ("authorization", f"Bearer {token}"))

    async def close(self) -> None:
        """Closes the channel, which ends its calls."""
        if self._channel is not None:
            await self._channel.close()

    def _find(self) -> tuple[str, grpc.ChannelCredentials | None]:
        """The address for gRPC, and the credentials of a connection. Reads files."""
        if self._context is None:
            target, credentials, _ = find_parts(self._address)
            return target, credentials
        require_no_token(f"the context {self._context.name} has a certificate")
        self._context.require_valid()
        texts = self._context.authorities, self._context.key, self._context.certificate
        return self._address, grpc.ssl_channel_credentials(*(text.encode() for text in texts))

    async def _renew(self, context: Context) -> None:
        """Renews a certificate that is due. Calls under way end on the channel with the old one."""
        now_s = time.time()
        is_due = context.renew_s <= now_s < context.expire_s and time.monotonic() >= self._next_renewal_s
        if not is_due:
            return
        self._next_renewal_s = time.monotonic() + RENEW_RETRY_S
        from leasehold_client.coordinator.login import renew  # late: most runs renew nothing

        try:
            self._context = await asyncio.to_thread(renew, context.name, context.certificate)
        except LeaseholdError as error:
            logger.warning("the certificate of %s can't be renewed: %s", context.identity, error.message)
            return
        if self._channel is not None:
            await self._channel.close(grace=RENEW_RETRY_S)
            self._channel = None
