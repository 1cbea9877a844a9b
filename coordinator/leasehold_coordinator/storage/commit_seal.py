"""The seal: the number of a store's last commit, in a file apart from the store.

If one bit of a write-ahead log is wrong, SQLite drops the rest of the log and opens the older database. The
store counts its commits, and also writes each number to the seal before it reports the commit as done. If the
store's number is smaller than the seal's number, the store has lost commits.

A number is written only after its commit is on disk, so a seal that is behind is harmless. Numbers are
therefore written without waiting for the disk. The kernel holds them, so a killed process loses none. A power
loss may lose the newest numbers: those of the last second while commits follow each other, otherwise those of
the kernel's writeback delay, half a minute by default. A loss of just these commits remains unnoticed.

Numbers go to two places in turn, each with a digest. A torn write leaves the previous number valid.
"""

import os
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, final

_NUMBER_BYTES: Final = 8
_DIGEST_BYTES: Final = 16
_PLACE_BYTES: Final = 512
"""The size of a disk sector, which a disk writes completely or not at all."""

SYNC_INTERVAL_S: Final = 1.0
"""The shortest time between two calls of fdatasync."""


@final
class CommitSeal:
    """The open seal file. All methods block.

    Args:
        path: The file, which is created if it is missing.

    Raises:
        OSError: The file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags, 0o600)
        self.number = self._read()
        """The last commit. 0: the file has no valid number, such as a new one."""
        self._synced_s = time.monotonic()

    def write(self, number: int) -> None:
        """Writes the number. Once per second, also waits until the number is on disk.

        Raises:
            OSError: The write failed.
        """
        data = number.to_bytes(_NUMBER_BYTES, "big")
        os.pwrite(self._descriptor, data + _digest(data), number % 2 * _PLACE_BYTES)
        if time.monotonic() - self._synced_s >= SYNC_INTERVAL_S:
            os.fdatasync(self._descriptor)
            self._synced_s = time.monotonic()
        self.number = number

    def close(self) -> None:
        """Closes the file, after a last fdatasync whose errors are ignored."""
        with suppress(OSError):
            os.fdatasync(self._descriptor)
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
