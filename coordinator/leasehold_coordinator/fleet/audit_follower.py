"""Follows the audit in the store, and adds each entry to the file of the setting ``audit_file``."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, final

from leasehold_coordinator.core.audit_hashes import FIRST
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_file import AuditFile
from leasehold_coordinator.storage.audit_chain import Link
from leasehold_coordinator.storage.store import Store

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_S: Final = 0.5
RETRY_S: Final = 5.0
"""How long a file is left alone that could not be written."""

STALL_S: Final = 5.0
"""How long the disk may take before that is reported."""

BATCH_LIMIT: Final = 200
"""Most entries of one write. They hold about 1.5 MB."""


@final
class AuditFollower:
    """Writes the file. A file that can't be written delays nobody, and misses nothing once it can be.

    Args:
        store: The store.
        path: The file.
        on_change: Called at each change with whether the file can be written.
    """

    def __init__(self, store: Store, path: Path, on_change: Callable[[bool], Awaitable[None]]) -> None:
        self._store = store
        self._path = path
        self._on_change = on_change
        self._file: AuditFile | None = None
        self._last: Link | None = None
        """The last written entry. None: unknown."""
        self._has_read = False
        """Whether the store was read since the file was opened."""
        self._is_serving: bool | None = None
        self._thread = ThreadPoolExecutor(1, "audit-file")
        """Does everything with the file, so nothing closes the file during a write."""

    async def follow(self) -> None:
        """Follows the audit until it is cancelled."""
        try:
            while True:
                try:
                    is_behind = await self._write()
                except (OSError, FleetError) as error:
                    self._leave()
                    if isinstance(error, OSError) and error.errno == errno.ESTALE:
                        continue  # a new file begins
                    why = error.message if isinstance(error, FleetError) else error.strerror
                    await self._tell(is_serving=False, why=why or str(error))
                    await asyncio.sleep(RETRY_S)
                    continue
                await self._tell(is_serving=True)
                if not is_behind:
                    await asyncio.sleep(POLL_S)
        finally:
            self._leave()
            self._thread.shutdown(wait=False)

    async def _do(self, work: Callable[[], Result]) -> Result:
        """Does something with the file. A disk that hangs is reported, and waited for."""
        loop = asyncio.get_running_loop()
        under_way = loop.run_in_executor(self._thread, work)
        done, _ = await asyncio.wait({under_way}, timeout=STALL_S)
        if not done:
            await self._tell(is_serving=False, why=f"the disk has not answered for {STALL_S:g} s")
        return await under_way

    def _leave(self) -> None:
        """Closes the file, once a write under way has ended. The next attempt opens the file again."""
        if self._file is not None:
            self._thread.submit(self._file.close)
            self._file = None

    async def _write(self) -> bool:
        """Writes the next entries. Returns whether others may follow.

        Raises:
            OSError: The file can't be written.
            FleetError: The store can't be read.
        """
        if self._file is None:
            self._file = await self._do(partial(AuditFile, self._path))
            self._has_read = False
            found = self._file.last
            if found is not None and (self._last is None or found.number > self._last.number):
                self._last = found
        last, committed = self._last or Link(0, FIRST), self._store.last_audit_number
        if self._has_read and (committed is None or committed <= last.number):
            return False
        entries = await self._store.audit_after(last, BATCH_LIMIT)
        if entries is None:
            logger.warning(
                "%s has entry %d of another audit than the store: it begins anew", self._path, last.number
            )
            await self._do(self._file.rotate)
            self._last = None
            return True
        if entries:
            await self._do(partial(self._file.append, entries))
            self._last = Link(entries[-1].number, entries[-1].hash)
        self._has_read = True
        return len(entries) == BATCH_LIMIT

    async def _tell(self, *, is_serving: bool, why: str = "") -> None:
        if is_serving == self._is_serving:
            return
        if not is_serving:
            logger.error("the audit can't be written to %s: %s; the store keeps it", self._path, why)
        elif self._is_serving is not None:
            logger.warning("the audit can be written to %s again", self._path)
        self._is_serving = is_serving
        await self._on_change(is_serving)
