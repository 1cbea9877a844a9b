"""Reads of the store, in threads and with a deadline."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, final

import sqlalchemy as sa

from leasehold_coordinator import metrics
from leasehold_coordinator.storage.database import READERS, Database
from leasehold_coordinator.storage.read_errors import corrupt, is_corrupt, unavailable

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

READ_LIMIT_S: Final = 10.0
"""The deadline of a read for a request. Reads at the start have none."""

LIST_READERS: Final = 2
"""Readers for the pages of lists. Other reads have readers of their own, and never wait for a page."""


@final
class Readers:
    """The threads that read a database. :meth:`close` waits for them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._records = ThreadPoolExecutor(READERS - LIST_READERS, "store-reader")
        self._pages = ThreadPoolExecutor(LIST_READERS, "store-list-reader")

    async def read(
        self, query: Callable[[sa.Connection], Found], deadline_s: float | None = READ_LIMIT_S
    ) -> Found:
        """The result of a query.

        Args:
            query: Runs in a thread.
            deadline_s: Longest time of the read, with its wait. None: no limit.

        Raises:
            FleetError: STORAGE_UNAVAILABLE.
        """
        return await self._run(query, deadline_s, self._records)

    async def read_page(self, query: Callable[[sa.Connection], Found]) -> Found:
        """As :meth:`read`, for a query that reads many rows."""
        return await self._run(query, READ_LIMIT_S, self._pages)

    async def select(self, statement: sa.Select[Any], deadline_s: float | None = READ_LIMIT_S) -> list[Any]:
        """The rows of a statement. Arguments and errors as of :meth:`read`."""
        return await self.read(lambda connection: list(connection.execute(statement)), deadline_s)

    def close(self) -> None:
        """Waits for the reads."""
        self._records.shutdown()
        self._pages.shutdown()

    async def _run(
        self, query: Callable[[sa.Connection], Found], deadline_s: float | None, readers: ThreadPoolExecutor
    ) -> Found:
        def run() -> Found:
            with self._database.read() as connection:
                return query(connection)

        began_s = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.get_running_loop().run_in_executor(readers, run)
        except TimeoutError as error:
            logger.error("the store has not answered a read for %g s", deadline_s)
            raise unavailable("read in time") from error
        except sa.exc.SQLAlchemyError as error:
            logger.error("the store can't be read: %s", getattr(error, "orig", None) or error)
            raise (corrupt() if is_corrupt(error) else unavailable("read")) from error
        finally:
            metrics.READ_SECONDS.observe(time.monotonic() - began_s)
