"""Ports for servers that are told theirs beforehand."""

import secrets
import socket
from typing import Final

_RANGE: Final = range(20_000, 32_000)
"""Below those that the kernel gives to connections, which may take one at any moment."""


def free_port() -> int:
    """A port of the loopback address that nobody has now. That two tests choose the same one is unlikely."""
    while True:
        port = secrets.choice(_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
