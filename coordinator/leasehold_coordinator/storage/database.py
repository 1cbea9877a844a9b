"""The database under the store: locked for one coordinator, and migrated to the newest tables.

Two coordinators on one database would give out the same epochs. All writes use one connection. A SQLite file
that has lost commits is refused before any change.
"""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import sqlalchemy as sa

from leasehold_coordinator.storage.database_url import database_url
from leasehold_coordinator.storage.store_file import BUSY_TIMEOUT_S, IN_USE, StoreFile, open_file, unusable
from leasehold_coordinator.storage.tables import make_tables

logger = logging.getLogger(__name__)

READERS: Final = 4
"""Concurrent connections for reads, each with a cache of its own."""

CACHE_KIB: Final = 1024
"""Page cache of each connection to a SQLite file."""

ADVISORY_LOCK: Final = 0x6C65617365686F6C
"""The key of the advisory lock that a coordinator takes on a PostgreSQL database."""


@final
@dataclass(frozen=True, slots=True)
class Database:
    """An open database. Open it with :meth:`open`."""

    engine: sa.Engine
    writer: sa.Connection
    file: StoreFile | None

    @classmethod
    def open(cls, database: str) -> "Database":
        """Opens and locks a database for this coordinator, and migrates its tables.

        Args:
            database: Path of a SQLite file, or a URL of SQLAlchemy.

        Raises:
            StartError: The database can't be opened or written, or another coordinator has locked it.
        """
        with ExitStack() as undone:
            try:
                url = database_url(database)
                path = _file_of(url)
                in_memory = path is None and url.get_backend_name() == "sqlite"
                bounds = {} if in_memory else {"pool_size": READERS + 1, "max_overflow": 0}
                engine = sa.create_engine(url, hide_parameters=True, **bounds)  # records have secrets
                undone.callback(engine.dispose)
                store_file = undone.enter_context(closing(open_file(path))) if path is not None else None
                if engine.dialect.name == "sqlite":
                    sa.event.listen(engine, "connect", _set_pragmas)
                writer = undone.enter_context(
                    closing(_prepare(engine, store_file.path if store_file else None))
                )
                if store_file is not None:
                    store_file.found = store_file.identify()
            except sa.exc.NoSuchModuleError as error:
                raise unusable(database, "no installed package serves the scheme of this URL") from error
            except ModuleNotFoundError as error:
                raise unusable(database, f"the Python module {error.name} is not installed") from error
            except (sa.exc.SQLAlchemyError, OSError, ImportError) as error:
                why = str(getattr(error, "orig", None) or error).splitlines()[0]
                raise unusable(database, why) from error
            undone.pop_all()
            return cls(engine, writer, store_file)

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction on the writer's connection.

        Raises:
            SQLAlchemyError: The lock on the database was lost, or the write failed. Nothing was changed.
        """
        number = 0
        if self.file is not None:
            self.file.require_in_place()
        with self.writer.begin():
            _take_for_us(self.writer)  # taken again, since a broken connection loses the lock
            yield self.writer
            if self.file is not None:
                number = self.file.count(self.writer)
        if self.file is not None:
            self.file.keep(number)
            self._shorten_log(self.file)

    def _shorten_log(self, file: StoreFile) -> None:
        """Keeps the write-ahead log short. A failure does not affect the commit."""
        try:
            file.shorten_log(self.writer)
        except (sqlite3.Error, OSError) as error:
            logger.warning("the write-ahead log of %s can't be emptied: %s", file.path.name, error)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection for reads, from any thread."""
        with self.engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Closes all connections, and releases the lock."""
        self.writer.close()
        self.engine.dispose()
        if self.file is not None:
            self.file.close()


def _prepare(engine: sa.Engine, path: Path | None) -> sa.Connection:
    """The writer's connection to the locked and migrated database."""
    connection = engine.connect()
    try:
        with connection.begin():
            _take_for_us(connection)
            make_tables(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def file_of_database(database: str) -> Path | None:
    """The SQLite file of a store. None: the store is on a database server.

    Args:
        database: Path of a SQLite file, or a URL of SQLAlchemy.

    Raises:
        StartError: The URL is malformed.
    """
    return _file_of(database_url(database))


def _file_of(url: sa.URL) -> Path | None:
    """The file of a database. None: the database is on a server or in memory."""
    name = (url.database or "").removeprefix("file:")
    if url.get_backend_name() != "sqlite" or url.host or name in ("", ":memory:"):
        return None
    return Path(name)


def _take_for_us(connection: sa.Connection) -> None:
    """Locks a PostgreSQL database for the lifetime of this connection. A SQLite file has its own lock.

    Raises:
        SQLAlchemyError: Another coordinator has the lock.
    """
    if connection.dialect.name == "postgresql":
        taken = connection.scalar(sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK)))
        if not taken:
            raise sa.exc.InvalidRequestError(IN_USE)


def _set_pragmas(connection: Any, _record: object) -> None:
    # Invalid UTF-8 means one damaged row, which must not fail the read of all other rows.
    connection.text_factory = _text
    try:
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={BUSY_TIMEOUT_S * 1000:.0f}",
            f"cache_size=-{CACHE_KIB}",
        ):
            connection.execute(f"PRAGMA {pragma}").close()
    except BaseException:
        connection.close()  # SQLAlchemy does not know this connection yet
        raise


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")
