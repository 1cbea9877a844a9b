"""The bearer token of a coordinator on this host.

Any user of a host can listen on its loopback address while no coordinator does. So a token is sent only to a
listener of root or of the token's owner.
"""

import ipaddress
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from leasehold_client.config import state_directory
from leasehold_client.errors import UsageError

TOKEN_VARIABLE: Final = "LEASEHOLD_TOKEN_FILE"
"""Environment variable with the path of the token's file."""

FILE_LIMIT_BYTES: Final = 4_096
_LISTEN: Final = "0A"
"""TCP_LISTEN in /proc/net/tcp (proc_net_tcp.txt of the kernel)."""


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT names this host's loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(address: str) -> str | None:
    """The token for a coordinator, read anew for each call. None: none is sent.

    Args:
        address: HOST:PORT of the coordinator.

    Raises:
        UsageError: The file is unreadable, or another user listens at the address.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None and not is_loopback(address):
        return None
    path = Path(given) if given else state_directory() / "client.token"
    try:
        token, owner = _read(path)
    except FileNotFoundError:
        if given is None:
            return None
        raise UsageError(f"there is no token at {path}: correct {TOKEN_VARIABLE}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the token {path} can't be read: {why}; name another with {TOKEN_VARIABLE}") from None
    if is_loopback(address):
        _require_listener_of(owner, address)
    return token


def _read(path: Path) -> tuple[str, int]:
    """The token in a file, and the file's owner.

    Raises:
        OSError: The file is unreadable.
        ValueError: The file holds no token.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        token = file.read(FILE_LIMIT_BYTES).decode("ascii", "replace").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("it holds no token")
    return token, found.st_uid


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _require_listener_of(owner: int, address: str) -> None:
    port = int(address.rpartition(":")[2])
    for uid in set(_listeners(port)) - {0, owner}:
        raise UsageError(
            f"the listener at {address} belongs to the Unix user {uid}, and not to root or the owner of the "
            "token, so the token is not sent: stop that program, or name another coordinator"
        )


def _listeners(port: int) -> Iterator[int]:
    """The users that listen on a port of the loopback address, or of all addresses."""
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as lines:
                next(lines, None)
                for line in lines:
                    _, local, _, state, _, _, _, uid, *_ = line.split()
                    if state != _LISTEN:
                        break  # the kernel lists listeners first
                    host, _, number = local.partition(":")
                    if int(number, 16) == port and _is_reached(host):
                        yield int(uid)
        except FileNotFoundError:
            continue  # a kernel without IPv6


def _is_reached(host: str) -> bool:
    """Whether calls to loopback reach a listener's address, in the kernel's words of 4 little-endian bytes."""
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or (mapped or address).is_unspecified
