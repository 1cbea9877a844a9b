"""The number of the journal's last commit, in a file apart from the journal.

SQLite drops the rest of a write-ahead log that has one wrong bit, and opens the database as it was before.
The journal counts its commits, and each number is also written here, before the commit is reported. A journal
whose number is smaller than the number here has lost commits.

A number is written only after its commit is on disk, so a number that lags behind does no harm. Numbers are
therefore written without waiting for the disk. A killed process loses none of them, because the kernel has
them. A power loss may lose the numbers of the last second while commits follow each other, or of the time
after which the kernel writes by itself, by default half a minute. If the disk lost commits of just these
moments, the loss goes unnoticed; the loss of earlier ones is detected.

Numbers go to two places in turn, each with its digest, so that a torn write leaves the previous number.
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
"""Disks write this many bytes whole, or not at all."""

SYNC_INTERVAL_S: Final = 1.0
"""The shortest time between two waits for the disk."""


@final
class JournalSeal:
    """The open file. All calls block, and belong in a thread.

    Args:
        path: The file. A missing one is created.

    Raises:
        OSError: The file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self.number: int | None = self._read()
        """The last commit. None: the file has no valid number, as when it is new."""
        self._synced_s = time.monotonic()

    def write(self, number: int) -> None:
        """Stores the number. Once per second, the number is on disk before this returns.

        Raises:
            OSError: The disk refuses the write.
        """
        data = number.to_bytes(_NUMBER_BYTES, "big")
        os.pwrite(self._descriptor, data + _digest(data), number % 2 * _PLACE_BYTES)
        if time.monotonic() - self._synced_s >= SYNC_INTERVAL_S:
            os.fdatasync(self._descriptor)
            self._synced_s = time.monotonic()
        self.number = number

    def close(self) -> None:
        """Closes the file, after writing it to disk if the disk accepts that."""
        with suppress(OSError):
            os.fdatasync(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> int | None:
        numbers = []
        for place in range(2):
            found = os.pread(self._descriptor, _NUMBER_BYTES + _DIGEST_BYTES, place * _PLACE_BYTES)
            data = found[:_NUMBER_BYTES]
            if found == data + _digest(data):
                numbers.append(int.from_bytes(data, "big"))
        return max(numbers, default=None)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
