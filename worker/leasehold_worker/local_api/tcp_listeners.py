"""Listening sockets of the worker's ports."""

import errno
import ipaddress

import trio

from leasehold_worker.errors import StartError


async def open_listeners(address: str, purpose: str, option: str, backlog: int) -> list[trio.SocketListener]:
    """Listens on an address.

    Args:
        address: HOST:PORT.
        purpose: What the port is for, for messages.
        option: The option that names another address, for messages.
        backlog: Most connections that wait to be accepted.

    Raises:
        StartError: The address can't be used.
    """
    try:
        return await _open(address, backlog)
    except OSError as error:
        raise _refusal(address, purpose, option, error) from error


async def require_bindable(address: str, purpose: str, option: str) -> None:
    """Listens on an address for a moment, since gRPC would log a line of its own and not report the cause.

    A name may have addresses of which this host lacks some, such as that of ``localhost`` for IPv6. gRPC does
    with the others.

    Args and raises:
        As for :func:`open_listeners`.
    """
    try:
        for listener in await _open(address, backlog=1):
            await listener.aclose()
    except OSError as error:
        if error.errno == errno.EADDRINUSE or _is_literal(_host(address)):
            raise _refusal(address, purpose, option, error) from error


async def _open(address: str, backlog: int) -> list[trio.SocketListener]:
    port = int(address.rpartition(":")[2])
    return await trio.open_tcp_listeners(port, host=_host(address), backlog=backlog)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _refusal(address: str, purpose: str, option: str, error: OSError) -> StartError:
    why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return StartError(f"can't listen on {address} for {purpose}: {why}; choose another with {option}")
