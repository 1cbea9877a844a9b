"""The free space of a volume, measured beside the worker's loop: a volume that hangs blocks statvfs(3)."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import trio

from leasehold_worker.threads import run_in_thread

LOOK_INTERVAL_S: Final = 1.0
LOOK_TIMEOUT_S: Final = 10.0
"""Time for the volume to answer. After that, its free space is unknown."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A volume.

    Attributes:
        total_bytes: Its size.
        available_bytes: Bytes that a user other than root may still write.
    """

    total_bytes: int
    available_bytes: int


def disk_space(directory: Path) -> DiskSpace:
    """The disk space of a directory's volume, by statvfs(3).

    Raises:
        OSError: The volume can't be read.
    """
    facts = os.statvfs(directory)
    return DiskSpace(facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize)


@final
class Volume:
    """The volume of a directory.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: DiskSpace | OSError = OSError(errno.ETIMEDOUT, "no answer in time")
        self._limiter = trio.CapacityLimiter(1)
        """Held by the running measurement, forever if it hangs."""

    def space(self) -> DiskSpace:
        """The last measurement.

        Raises:
            OSError: The volume can't be measured.
        """
        if isinstance(self._found, OSError):
            raise self._found
        return self._found

    async def look(self) -> None:
        """Measures the free space."""
        found: DiskSpace | OSError = OSError(errno.ETIMEDOUT, "no answer in time")
        with trio.move_on_after(LOOK_TIMEOUT_S):
            try:
                found = await run_in_thread(
                    disk_space, self._directory, abandon_on_cancel=True, limiter=self._limiter
                )
            except OSError as error:
                found = error
        self._found = found

    async def run(self) -> None:
        """Measures repeatedly, until cancelled."""
        while True:
            await trio.sleep(LOOK_INTERVAL_S)
            await self.look()
