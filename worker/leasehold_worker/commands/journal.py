"""The journal: the durable state of the worker, written in order.

An update is sent to the coordinator only once it is on disk, so a restart never contradicts it. While the
disk refuses writes, new commands and new phases are refused. Pending writes follow as soon as the disk
accepts them.
"""

import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker import metrics
from leasehold_worker.commands.journal_file import PROBE, Contents, JournalFile, MovedError, Statement
from leasehold_worker.errors import OperationError
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
WRITE_TIMEOUT_S: Final = 10.0
"""Timeout of :meth:`Journal.write` for a disk that hangs. Short, since members may be locked."""

LATER_S: Final = 1.0
"""Delay of a write that nothing waits for, so that it shares a commit with others."""

TURN_LIMIT: Final = 20
"""Turns of the event loop that a batch waits for at most."""

CLOSE_TIMEOUT_S: Final = 10.0
"""Time that the end of the worker waits for the disk."""

DISK_REMEDY: Final = "check the disk of its state directory"
MOVED_REMEDY: Final = (
    "move the same files back, which a copy is not, or move what is left of them away and restart the "
    "worker, which finds its running programs again"
)


@dataclass(eq=False, slots=True)
class _Write:
    statements: list[Statement]
    then: list[Callable[[], None]] = field(default_factory=list)
    refused: Callable[[OperationError], None] | None = None
    """Called instead if the disk refuses the write; without it the write is repeated until it succeeds."""


@final
class Journal:
    """The journal of one worker. Made by :func:`open_journal`, which runs its writer."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._waiting: dict[tuple[str, str], _Write] = {}
        self._later: dict[tuple[str, str], _Write] = {}
        """Writes for the next commit, which nothing waits for."""
        self._pause = trio.CancelScope()
        """The wait before a commit of later writes alone."""
        self._wake = trio.Event()
        self._settled = trio.Event()
        self._settled.set()
        self._number = count()
        self.refusal: OperationError | None = None
        """Why the journal can't be written. None: it can, as far as is known."""

    @property
    def contents(self) -> Contents:
        """The state that an earlier run of the worker stored."""
        return self._file.contents

    @property
    def waiting(self) -> int:
        """Number of writes that wait for the disk."""
        return len(self._waiting) + len(self._later)

    @property
    def is_settled(self) -> bool:
        """Whether all writes are on disk, except those with ``later``."""
        return self._settled.is_set()

    def put(
        self,
        key: tuple[str, str],
        statements: list[Statement],
        then: Callable[[], None] | None = None,
        *,
        refused: Callable[[OperationError], None] | None = None,
        later: bool = False,
    ) -> None:
        """Writes after all earlier writes, then calls ``then``.

        A newer write replaces one with the same key that waits or was refused: its ``then`` is called with
        that of the newer one.

        Args:
            key: Table and row.
            statements: The statements.
            then: Called once the write is on disk, in the order of the writes.
            refused: Called instead if the disk refuses the write. Without it, the write is repeated until it
                succeeds.
            later: The write may get lost in a crash. It shares the next commit, after a second at most.
        """
        later = later and key not in self._waiting
        write = self._waiting.pop(key, None) or self._later.pop(key, None) or _Write([])
        write.statements = statements
        write.refused = refused
        if then is not None:
            write.then.append(then)
        if later:
            if not self._later:
                self._pause.deadline = trio.current_time() + LATER_S
            self._later[key] = write
            return
        self._waiting[key] = write
        self._settled = trio.Event() if self._settled.is_set() else self._settled
        self._wake.set()

    def after_all(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once all earlier writes are on disk, perhaps at once."""
        if self.is_settled:
            then()
        else:
            # A write of its own: none that may be refused takes it along.
            self.put(("", str(next(self._number))), [], then)

    async def write(self, key: tuple[str, str], statements: list[Statement]) -> None:
        """Writes, and returns once the write is on disk.

        Raises:
            OperationError: STORAGE_UNAVAILABLE: the disk refused the write, or did not answer in time. Then
                it may still be written, before all later writes.
        """
        done = trio.Event()
        failure: list[OperationError] = []

        def fail(error: OperationError) -> None:
            failure.append(error)
            done.set()

        self.put(key, statements, done.set, refused=fail)
        with trio.move_on_after(WRITE_TIMEOUT_S):
            await done.wait()
        if not done.is_set():
            fail(self._find_unavailable(f"no answer within {WRITE_TIMEOUT_S:g} s"))
        if failure:
            raise failure[0]

    async def wait_written(self) -> None:
        """Waits until all earlier writes are on disk.

        Raises:
            OperationError: STORAGE_UNAVAILABLE: a write is not on disk yet, and follows once the disk accepts
                it.
        """
        await self.write(("", str(next(self._number))), [])

    async def wait_settled(self) -> None:
        """Waits until all writes are on disk, including those with ``later``."""
        while self._later or not self.is_settled:
            if self.is_settled:
                self._waiting, self._later = self._later, {}
                self._settled = trio.Event()
                self._wake.set()
            await self._settled.wait()

    async def run(self) -> None:
        """Writes pending statements for as long as the worker lives."""
        while True:
            with self._pause:
                await self._wake.wait()
            self._wake, self._pause = trio.Event(), trio.CancelScope()
            await self._write_waiting()
            while self._waiting:
                await self._write_waiting()
            self._settled.set()

    async def _wait_quiet_turn(self) -> None:
        """Waits until a turn of the event loop adds no write, so that simultaneous writes share a commit."""
        for _ in range(TURN_LIMIT):
            seen = len(self._waiting)
            await trio.lowlevel.checkpoint()
            if len(self._waiting) <= seen:
                return

    async def _write_waiting(self) -> None:
        await self._wait_quiet_turn()
        batch = [*self._later.items(), *self._waiting.items()]
        self._later, self._waiting = {}, {}
        try:
            await self._commit([statement for _, write in batch for statement in write.statements])
        except (sqlite3.Error, OSError) as error:  # OSError: no thread can be started
            metrics.JOURNAL_ERRORS.inc()
            await self._refuse(batch, error)
            return
        if self.refusal is not None:
            logger.warning("the journal is writable again")
            self.refusal = None
        for _, write in batch:
            for then in write.then:
                then()

    async def _commit(self, statements: list[Statement]) -> None:
        began_s = time.monotonic()
        try:
            await run_in_thread(self._file.commit, statements, abandon_on_cancel=True)
        finally:
            metrics.JOURNAL_COMMIT_SECONDS.observe(time.monotonic() - began_s)

    def _find_unavailable(self, why: str, remedy: str = DISK_REMEDY) -> OperationError:
        """Records that the journal can't be written, until a write succeeds."""
        refusal = OperationError(
            errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
            f"the worker's journal can't be written ({why}): {remedy}",
        )
        if self.refusal is None:
            logger.error("%s; the worker accepts no command until the journal is writable", refusal.message)
        self.refusal = refusal
        return refusal

    async def _refuse(self, batch: Sequence[tuple[tuple[str, str], _Write]], error: Exception) -> None:
        remedy = MOVED_REMEDY if isinstance(error, MovedError) else DISK_REMEDY
        refusal = self._find_unavailable(str(error), remedy)
        newer = self._later | self._waiting
        self._later, self._waiting = {}, {}
        for key, write in batch:
            follower = newer.get(key)
            if follower is not None and follower.refused is None:
                follower.then[:0] = write.then
            elif write.refused is not None:
                write.refused(refusal)
            else:
                self._waiting[key] = write
        self._waiting |= newer
        self._waiting.setdefault(("probes", ""), _Write(PROBE))
        await trio.sleep(RETRY_S)


@asynccontextmanager
async def open_journal(path: Path) -> AsyncIterator[Journal]:
    """Opens the journal and runs its writer. Pending writes are written at the end, in bounded time.

    Raises:
        StartError: The journal can't be used, and is left unchanged.
    """
    file = await run_in_thread(JournalFile, path)
    journal = Journal(file)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            try:
                yield journal
            finally:
                with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                    await journal.wait_settled()
                nursery.cancel_scope.cancel()
    finally:
        # A commit that hangs holds the file for as long.
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True), contextlib.suppress(sqlite3.Error, OSError):
            await run_in_thread(file.close, abandon_on_cancel=True)
