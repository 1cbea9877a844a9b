"""Ports of gRPC servers."""

import errno
import socket
from typing import Final

import grpc

from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server.transport import PortTls

INSECURE_SCHEME: Final = "insecure:"
"""Beginning of an address without TLS, for clients and workers too."""


def add_port(server: grpc.aio.Server, address: str, option: str, tls: PortTls | None) -> str:
    """Adds a port to a server, with a port number in the place of port 0.

    Args:
        server: The server, before its start.
        address: HOST:PORT.
        option: The option that names another address, for messages.
        tls: The server's certificate. None: the port has no TLS.

    Returns:
        The address as clients write it.

    Raises:
        StartError: The address can't be used.
    """
    check_address(address, option)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise StartError(f"can't listen on {address}: {error}; choose another with {option}") from error
    scheme = INSECURE_SCHEME if tls is None else ""
    return f"{scheme}{address.rpartition(':')[0]}:{port}"


def check_address(address: str, option: str) -> None:
    """Binds the address on trial. gRPC itself would log a line of its own, and would not report the cause.

    Raises:
        StartError: The coordinator can't listen on the address.
    """
    bind_port(address, option).close()


def bind_port(address: str, option: str) -> socket.socket:
    """A socket that is bound to an address.

    Args:
        address: HOST:PORT.
        option: The option that names another address, for messages.

    Raises:
        StartError: The coordinator can't listen on the address.
    """
    host, _, port = address.rpartition(":")
    refusals: list[OSError] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            bound = socket.socket(family, kind, protocol)
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(where)
            except OSError as error:
                bound.close()
                refusals.append(error)
            else:
                return bound
    except OSError as error:
        refusals.append(error)
    last = refusals[-1]
    why = "the port is in use" if last.errno == errno.EADDRINUSE else last.strerror or str(last)
    raise StartError(f"can't listen on {address}: {why}; choose another with {option}") from last
