"""The number of a store's last commit, in a file apart from the store.

SQLite drops the rest of a write-ahead log that has one wrong bit, and opens the database as it was before.
The store counts its commits, and each number is also written here, before anybody is told of that commit. A
store whose number is smaller has lost commits.

A crash between the two writes leaves the store one commit ahead. Numbers go to two places in turn, each with
its digest, so that a torn write leaves the number before.
"""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Final, final

_NUMBER_BYTES: Final = 8
_DIGEST_BYTES: Final = 16
_PLACE_BYTES: Final = 512
"""Disks write this many bytes whole, or not at all."""


@final
class CommitSeal:
    """The open file. Everything here blocks.

    Args:
        path: The file. It is made if it is missing.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags, 0o600)
        self.number = self._read()
        """The last commit. 0: the file has no valid number, such as a new one."""

    def write(self, number: int) -> None:
        """Keeps the number, on disk before this returns.

        Raises:
            OSError: The disk refuses it.
        """
        data = number.to_bytes(_NUMBER_BYTES, "big")
        os.pwrite(self._descriptor, data + _digest(data), number % 2 * _PLACE_BYTES)
        os.fdatasync(self._descriptor)
        self.number = number

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _read(self) -> int:
        numbers = [0]
        for place in range(2):
            found = os.pread(self._descriptor, _NUMBER_BYTES + _DIGEST_BYTES, place * _PLACE_BYTES)
            data = found[:_NUMBER_BYTES]
            if found == data + _digest(data):
                numbers.append(int.from_bytes(data, "big"))
        return max(numbers)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
