"""Listening sockets of the worker's ports."""

import errno

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
    host, _, port = address.rpartition(":")
    try:
        return await trio.open_tcp_listeners(int(port), host=host.strip("[]"), backlog=backlog)
    except OSError as error:
        why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise StartError(
            f"can't listen on {address} for {purpose}: {why}; choose another with {option}"
        ) from error
