"""The room on a volume, measured beside the worker's loop: a volume that hangs blocks statvfs(3)."""

import errno
from pathlib import Path
from typing import Final, final

import trio

from leasehold_worker.host.capacity import DiskSpace, disk_space

LOOK_INTERVAL_S: Final = 1.0
LOOK_TIMEOUT_S: Final = 10.0
"""How long the volume may take to answer. After that, its room is not known."""


@final
class Volume:
    """The volume of a directory.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: DiskSpace | OSError = OSError(errno.ETIMEDOUT, "it does not answer")
        self._limiter = trio.CapacityLimiter(1)
        """Held by the measurement under way, for good by one that hangs."""

    def space(self) -> DiskSpace:
        """The room, as it was measured last.

        Raises:
            OSError: It can't be measured.
        """
        if isinstance(self._found, OSError):
            raise self._found
        return self._found

    async def look(self) -> None:
        """Measures the room."""
        found: DiskSpace | OSError = OSError(errno.ETIMEDOUT, "it does not answer")
        with trio.move_on_after(LOOK_TIMEOUT_S):
            try:
                found = await trio.to_thread.run_sync(
                    disk_space, self._directory, abandon_on_cancel=True, limiter=self._limiter
                )
            except OSError as error:
                found = error
        self._found = found

    async def run(self) -> None:
        """Measures again and again, until cancelled."""
        while True:
            await trio.sleep(LOOK_INTERVAL_S)
            await self.look()
