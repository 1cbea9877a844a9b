"""The writes to the store: one thread commits them in batches, on one connection.

Each batch is one transaction. A batch collects, in order, the writes that arrive during the previous commit.
It also takes later writes, until a turn of the event loop adds none. A write returns only when it is on disk
(``synchronous=FULL``).
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

import sqlalchemy as sa
from leasehold.v1 import errors_pb2

from leasehold_coordinator import metrics
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.storage.audit_chain import AuditChain
from leasehold_coordinator.storage.database import Database
from leasehold_coordinator.storage.read_errors import corrupt, is_corrupt, is_locked, is_refused, unavailable
from leasehold_coordinator.storage.rows import Change
from leasehold_coordinator.storage.statements import apply_changes
from leasehold_coordinator.storage.write_health import WriteHealth, stalled

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 10_000
"""Most waiting writes. Beyond the limit the disk is too slow, and new writes are refused."""

BATCH_LIMIT: Final = 1_000
TURN_LIMIT: Final = 20
"""Most turns of the event loop that a batch waits for."""


@dataclass(frozen=True, slots=True)
class _Write:
    rows: Sequence[Change]
    done: "asyncio.Future[None]"


@final
class WriteQueue:
    """The queue of writes, and the thread that commits them.

    Args:
        database: The database.
        health: Told of each commit.
        served_s: Seconds in which the store was served, in total.
    """

    def __init__(self, database: Database, health: WriteHealth, served_s: Callable[[], int]) -> None:
        self._database = database
        self._health = health
        self._served_s = served_s
        self.audit = AuditChain()
        """The end of the audit's chain. The writer moves it."""
        self._is_refused = False
        """Whether the disk refused the last commit. The writer sets it."""
        self._waiting: list[_Write] = []
        """Writes of the next batch, in order."""
        self._is_taken = False
        """Whether a batch is being committed, or its commit is scheduled."""
        self._batches: queue.SimpleQueue[tuple[list[_Write], asyncio.AbstractEventLoop | None]] = (
            queue.SimpleQueue()
        )
        """Batches for the writer, each with the waiting event loop. A batch without a loop is the last."""
        self._writer = threading.Thread(target=self._write_batches, name="store-writer")
        self._writer.start()

    @property
    def waiting(self) -> int:
        """Number of writes that wait for the present commit to end."""
        return len(self._waiting)

    async def write(self, rows: Sequence[Change]) -> None:
        """Writes or deletes the rows in one transaction, and returns once they are on disk.

        Raises:
            FleetError: STORAGE_UNAVAILABLE, nothing was written.
        """
        if self._health.is_stalled:
            raise stalled()
        if len(self._waiting) >= QUEUE_LIMIT:
            raise FleetError(
                errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
                f"{QUEUE_LIMIT} writes wait for the store's disk: try again later",
            )
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._waiting.append(_Write(rows, done))
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._hand_over, loop, 0)
        await done  # a cancellation of the caller does not cancel the write

    def _hand_over(self, loop: asyncio.AbstractEventLoop, seen: int, turns: int = 1) -> None:
        """Passes the waiting writes to the writer once a turn of the event loop adds no write.

        Args:
            loop: The event loop.
            seen: Number of waiting writes at the previous turn.
            turns: Number of turns so far.
        """
        if turns < TURN_LIMIT and seen < len(self._waiting) < BATCH_LIMIT:
            loop.call_soon(self._hand_over, loop, len(self._waiting), turns + 1)
            return
        batch, self._waiting = self._waiting[:BATCH_LIMIT], self._waiting[BATCH_LIMIT:]
        self._health.begin(self._refuse_waiting)
        self._batches.put((batch, loop))

    def _refuse_waiting(self) -> None:
        """Refuses the writes that wait for a commit beyond its deadline. They were not begun."""
        refused, self._waiting = self._waiting, []
        for write in refused:
            if not write.done.done():
                write.done.set_exception(stalled())

    def _answer(
        self, answers: Sequence[tuple[_Write, FleetError | None]], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Resolves the writes of a batch, and schedules the next batch after their callers have run."""
        self._health.end(is_serving=not self._is_refused)
        for write, error in answers:
            if write.done.done():  # its caller was cancelled
                continue
            if error is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(error)
        self._is_taken = bool(self._waiting)
        if self._is_taken:
            loop.call_soon(self._hand_over, loop, 0)

    def close(self) -> None:
        """Waits until everything is written."""
        self._batches.put((self._waiting, None))
        self._writer.join()

    def _write_batches(self) -> None:
        loop: asyncio.AbstractEventLoop | None
        while True:
            batch, loop = self._batches.get()
            answers = self._commit(batch) if batch else []
            if loop is None:
                return
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(self._answer, answers, loop)

    def _commit(self, batch: list[_Write]) -> list[tuple[_Write, FleetError | None]]:
        """Commits the writes together, or one by one if that fails. Returns the error of each write."""
        self._is_refused = False
        try:
            self._commit_rows([row for write in batch for row in write.rows])
        except (sa.exc.SQLAlchemyError, ArithmeticError, TypeError, ValueError) as error:
            # The driver raises the last three itself for a value out of the database's range.
            self.audit.forget()
            self._is_refused = is_refused(error)
            if len(batch) == 1 or is_locked(error):
                logger.error("the store can't be written: %s", error)
                failure = corrupt() if is_corrupt(error) else unavailable("written")
                return [(write, failure) for write in batch]
        except Exception:  # the writer thread must survive, or every write would wait forever
            self.audit.forget()
            if len(batch) == 1:
                logger.exception("a write to the store failed")
                return [(batch[0], unavailable("written"))]
        else:
            self.audit.confirm()
            return [(write, None) for write in batch]
        return [answer for write in batch for answer in self._commit([write])]

    def _commit_rows(self, rows: Sequence[Change]) -> None:
        began_s = time.monotonic()
        try:
            with self._database.write() as connection:
                apply_changes(connection, rows, self._served_s(), self.audit)
        except BaseException:
            metrics.COMMIT_ERRORS.inc()
            raise
        finally:
            metrics.COMMIT_SECONDS.observe(time.monotonic() - began_s)
