"""The peers of Unix sockets, as the kernel reports them by sock_diag(7)."""

import socket
import struct
from collections.abc import Iterator
from typing import Final

_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST: Final = 0x001
_DUMP: Final = 0x300
_ALL_STATES: Final = 0xFFFFFFFF
_SHOW_PEER: Final = 0x4
_PEER: Final = 2
_HEADER: Final = struct.Struct("=IHHII")
_ASKED: Final = struct.Struct("=BBHIIIII")
_SAID: Final = struct.Struct("=BBBBIII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_DONE, _ERROR = 3, 2
_PACKET_BYTES: Final = 1 << 16
_TIMEOUT_S: Final = 2.0


def unix_peers() -> dict[int, int]:
    """The inode of the other end of every connected Unix socket of this network namespace, by its inode.

    Raises:
        OSError: The kernel reports none.
    """
    asked = _ASKED.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_PEER, 0, 0)
    header = _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as diag:
        diag.settimeout(_TIMEOUT_S)
        diag.send(header + asked)
        peers: dict[int, int] = {}
        while True:
            for kind, body in _messages(diag.recv(_PACKET_BYTES)):
                if kind == _DONE:
                    return peers
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "sock_diag")
                inode = _SAID.unpack_from(body)[4]
                for attribute, value in _attributes(body[_SAID.size :]):
                    if attribute == _PEER:
                        peers[inode] = struct.unpack("=I", value)[0]


def _messages(packet: bytes) -> Iterator[tuple[int, bytes]]:
    while len(packet) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(packet)
        yield kind, packet[_HEADER.size : length]
        packet = packet[_padded(length) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[_padded(length) :]


def _padded(length: int) -> int:
    """Messages and attributes begin at multiples of four bytes."""
    return max(length + 3 & ~3, 4)
