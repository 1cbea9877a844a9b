"""What the worker must not forget, written in the order in which it happened and told only then.

Nothing is told to the coordinator that is not on disk, so no restart takes back a word. While the disk
refuses, new commands and new phases are refused, and what is held goes to disk as soon as that is possible.
"""

import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.commands.journal_file import PROBE, Contents, JournalFile, Statement
from leasehold_worker.errors import OperationError

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
WRITE_TIMEOUT_S: Final = 10.0
"""How long :meth:`Journal.write` waits for a disk that neither writes nor refuses: members may be locked."""

LATER_S: Final = 1.0
"""How long a write that nothing waits for waits for others, with which it shares a commit."""

TURN_LIMIT: Final = 20
"""Turns of the loop that a batch waits for at most."""

CLOSE_TIMEOUT_S: Final = 10.0
"""How long the end of the worker waits for the disk."""


@dataclass(eq=False, slots=True)
class _Write:
    statements: list[Statement]
    then: list[Callable[[], None]] = field(default_factory=list)
    refused: Callable[[OperationError], None] | None = None
    """Called instead where the disk refuses; without it the write is tried until it succeeds."""


@final
class Journal:
    """The journal of one worker. Made by :func:`open_journal`, which runs its writer."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._waiting: dict[tuple[str, str], _Write] = {}
        self._later: dict[tuple[str, str], _Write] = {}
        """Writes for the next commit, whenever that is."""
        self._pause = trio.CancelScope()
        """Ends when they have waited for long enough."""
        self._wake = trio.Event()
        self._settled = trio.Event()
        self._settled.set()
        self._number = count()
        self.refusal: OperationError | None = None
        """Why nothing can be written. None: it can, as far as is known."""

    @property
    def contents(self) -> Contents:
        """What an earlier start of the worker kept."""
        return self._file.contents

    @property
    def is_settled(self) -> bool:
        """Whether everything is on disk that was put, other than for later."""
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
        """Writes after everything that was put before, and then calls ``then``.

        What still waits under the same key, or is refused by the disk meanwhile, is replaced: its ``then`` is
        called with the new one's.

        Args:
            key: Table and row.
            statements: What to write.
            then: Called once that is on disk, in the order of the writes.
            refused: Called instead where the disk refuses. Without it, it is tried until it succeeds.
            later: A crash before this is on disk loses nothing. It shares the next commit, a second later at
                most.
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
        """Calls this once everything that was put before is on disk: at once where that is so."""
        if self.is_settled:
            then()
        else:
            # A write of its own: none that may be refused takes it along.
            self.put(("", str(next(self._number))), [], then)

    async def write(self, key: tuple[str, str], statements: list[Statement]) -> None:
        """Writes, and returns once that is on disk.

        Raises:
            OperationError: STORAGE_UNAVAILABLE: the disk refused it, or did not answer in time. Then it may
                still be written, before all that is put from now on.
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
        """Waits until everything that was put before is on disk.

        Raises:
            OperationError: STORAGE_UNAVAILABLE: it is not yet, and will be once it can.
        """
        await self.write(("", str(next(self._number))), [])

    async def wait_settled(self) -> None:
        """Waits until everything is on disk, also what was put for later."""
        while self._later or not self.is_settled:
            if self.is_settled:
                self._waiting, self._later = self._later, {}
                self._settled = trio.Event()
                self._wake.set()
            await self._settled.wait()

    async def run(self) -> None:
        """Writes what is put, for as long as the worker lives."""
        while True:
            with self._pause:
                await self._wake.wait()
            self._wake, self._pause = trio.Event(), trio.CancelScope()
            await self._write_waiting()
            while self._waiting:
                await self._write_waiting()
            self._settled.set()

    async def _wait_quiet_turn(self) -> None:
        """Waits until a turn of the loop puts nothing more: what comes together is one commit."""
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
            await trio.to_thread.run_sync(
                self._file.commit,
                [statement for _, write in batch for statement in write.statements],
                abandon_on_cancel=True,
            )
        except sqlite3.Error as error:
            await self._refuse(batch, error)
            return
        if self.refusal is not None:
            logger.warning("the journal is writable again")
            self.refusal = None
        for _, write in batch:
            for then in write.then:
                then()

    def _find_unavailable(self, why: str) -> OperationError:
        """Notes that nothing can be written, until something is."""
        refusal = OperationError(
            errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
            f"the worker's journal can't be written ({why}): check the disk of its state directory",
        )
        if self.refusal is None:
            logger.error("%s; the worker accepts no command until the journal is writable", refusal.message)
        self.refusal = refusal
        return refusal

    async def _refuse(self, batch: Sequence[tuple[tuple[str, str], _Write]], error: sqlite3.Error) -> None:
        refusal = self._find_unavailable(str(error))
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
    """Opens the journal and runs its writer. What waits at the end is written, in bounded time.

    Raises:
        StartError: It can't be used, and is left as it is.
    """
    file = await trio.to_thread.run_sync(JournalFile, path)
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
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True), contextlib.suppress(sqlite3.Error):
            await trio.to_thread.run_sync(file.close, abandon_on_cancel=True)
