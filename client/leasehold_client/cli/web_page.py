"""``leasehold web``: serves the web page until a signal ends it."""

import asyncio
import hmac
import ipaddress
import secrets
import signal
import socket
from contextlib import suppress
from typing import Final, NoReturn, final

import grpc
from leasehold.v1.access_service_pb2 import WhoAmIRequest
from leasehold_web.entries import Api, Entry, LoginRefusedError, open_api
from leasehold_web.server import WebServer

from leasehold_client.aio.caller_channel import CallerChannel
from leasehold_client.contexts import Context
from leasehold_client.display.standard_output import echo
from leasehold_client.errors import LeaseholdError, UsageError

SECRET_BYTES: Final = 24
NAMES: Final = ("127.0.0.1", "::1", "localhost")

CHECK_TIMEOUT_S: Final = 3.0
"""Less than the limit of a login. A silent coordinator refuses no login."""


def serve(listen: str, address: str, context: Context | None, on_behalf_of: str) -> None:
    """Serves the page until SIGINT or SIGTERM.

    Args:
        listen: HOST:PORT on loopback.
        address: The coordinator.
        context: The client certificate. None: a token, or the user of a socket.
        on_behalf_of: The user for whom a service acts. Empty: the caller itself.

    Raises:
        LeaseholdError: The address can't be used, or there are no credentials.
    """
    listener = _bind(listen)
    try:
        asyncio.run(_serve(listener, address, context, on_behalf_of))
    finally:
        listener.close()


async def _serve(listener: socket.socket, address: str, context: Context | None, on_behalf_of: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    channel = CallerChannel(address, context.name if context is not None else None, on_behalf_of)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    server = WebServer(OwnerDoors(channel, secret), NAMES)
    try:
        await channel.present()  # told now rather than by the first page
        await server.start(listener, None)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        echo(f"leasehold web: http://{shown}:{port}/login#token={secret}")
        await _renew_until(stop, channel)
    finally:
        await server.stop()
        await channel.close()


async def _renew_until(stop: asyncio.Event, channel: CallerChannel) -> None:
    """Waits for an event, and renews the certificate of the channel meanwhile. Open watches begin no call."""
    while not stop.is_set():
        try:
            async with asyncio.timeout(channel.limit(None).timeout_s):
                await stop.wait()
        except TimeoutError:
            with suppress(LeaseholdError):  # the next call of the page tells the problem
                await channel.present()


@final
class OwnerDoors:
    """The login of whoever started the page: all of its sessions share one identity.

    Args:
        channel: The channel to the coordinator.
        secret: The token of the printed address.
    """

    hint: str = "Open the address that `leasehold web` printed, or paste its part after token= here."

    def __init__(self, channel: CallerChannel, secret: str) -> None:
        self._channel = channel
        self._secret = secret
        self._known: tuple[grpc.aio.Channel, Api] | None = None
        self._entry = Entry("", self._api, self, b"", self._leave)

    async def by_token(self, token: str, address: str) -> Entry:
        """The login with the secret of the printed address."""
        if not hmac.compare_digest(token.encode(), self._secret.encode()):
            raise LoginRefusedError("the token is not that of this run of `leasehold web`: see its terminal")
        await self._require_accepted()
        return self._entry

    async def by_certificate(self, der: bytes, address: str) -> Entry:
        """Refuses: the page has no TLS."""
        self._refuse()

    async def again(self, kept: bytes) -> Entry:
        """Refuses: no session outlives the page."""
        self._refuse()

    async def _require_accepted(self) -> None:
        """Asks the coordinator whether it accepts the caller. An outage is told by the page.

        Raises:
            LoginRefusedError: The caller is blocked, or its credential is not valid any more.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                try:
                    api = await self._api()
                except LoginRefusedError:  # the credentials can't be read for now
                    return
                try:
                    await api.access.WhoAmI(WhoAmIRequest(), metadata=api.metadata)
                except grpc.aio.AioRpcError as error:
                    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                        raise LoginRefusedError(error.details() or "the coordinator refuses you") from None

    def _refuse(self) -> NoReturn:
        raise LoginRefusedError("this page knows only the token that `leasehold web` printed")

    async def _api(self) -> Api:
        """The API. Its stubs are made once for each channel."""
        try:
            channel, metadata = await self._channel.present()
        except LeaseholdError as error:
            raise LoginRefusedError(error.message) from error
        if self._known is None or self._known[0] is not channel:
            self._known = channel, open_api(channel)
        return self._known[1]._replace(metadata=metadata)

    async def _leave(self) -> None:
        """Does nothing: other sessions go on."""


def _bind(listen: str) -> socket.socket:
    """A socket that is bound to a loopback address.

    Raises:
        UsageError: The address is invalid, not on loopback, or in use.
    """
    host, _, port = listen.rpartition(":")
    name = host.strip("[]")
    try:
        is_loopback = name == "localhost" or ipaddress.ip_address(name).is_loopback
        number = int(port) if port.isascii() and port.isdecimal() else -1
        if not 0 <= number < 65_536:
            raise ValueError
    except ValueError:
        raise UsageError(f"invalid address {listen!r}: write HOST:PORT, such as 127.0.0.1:7480") from None
    if not is_loopback:
        raise UsageError(
            f"{host} is not on loopback, and whoever opens the page acts as you: listen on 127.0.0.1, or let "
            "the coordinator serve the page with `leasehold coordinator --web`"
        )
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(name, number, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(where)
    except OSError as error:
        raise UsageError(
            f"can't listen on {listen}: {error.strerror}; choose another address with --listen"
        ) from error
    return listener
