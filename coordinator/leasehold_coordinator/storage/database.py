"""The database under the store: opened for one coordinator alone, and brought up to date.

All is written on one connection. Two coordinators on one database would give out the same epochs. A SQLite
file that has lost commits is refused, before anything of it is changed.
"""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import sqlalchemy as sa

from leasehold_coordinator.storage.schema import METADATA, NEWEST
from leasehold_coordinator.storage.store_file import BUSY_TIMEOUT_S, IN_USE, StoreFile, open_file, unusable

logger = logging.getLogger(__name__)

READERS: Final = 4
"""Connections that are read on at once; each has a cache of its own."""

CACHE_KIB: Final = 1024
"""What each connection to a SQLite file keeps in memory of it."""

ADVISORY_LOCK: Final = 0x6C65617365686F6C
"""The key under which PostgreSQL keeps a database for one coordinator."""


@final
@dataclass(frozen=True, slots=True)
class Database:
    """An open database. Open it with :meth:`open`."""

    engine: sa.Engine
    writer: sa.Connection
    file: StoreFile | None

    @classmethod
    def open(cls, database: str) -> "Database":
        """Opens a database for this coordinator alone, and brings its tables up to date.

        Args:
            database: Path of a SQLite file, or a URL of SQLAlchemy.

        Raises:
            StartError: It can't be opened or written, or another coordinator has it.
        """
        with ExitStack() as undone:
            try:
                is_path = "://" not in database
                file = str(Path(database).expanduser())
                url = sa.URL.create("sqlite", database=file) if is_path else sa.make_url(database)
                path = _file_of(url)
                in_memory = path is None and url.get_backend_name() == "sqlite"
                bounds = {} if in_memory else {"pool_size": READERS + 1, "max_overflow": 0}
                engine = sa.create_engine(url, hide_parameters=True, **bounds)  # records have secrets
                undone.callback(engine.dispose)
                store_file = undone.enter_context(closing(open_file(path))) if path is not None else None
                if engine.dialect.name == "sqlite":
                    sa.event.listen(engine, "connect", _set_pragmas)
                writer = undone.enter_context(closing(_prepare(engine)))
                if store_file is not None:
                    store_file.found = store_file.identify()
            except (sa.exc.SQLAlchemyError, OSError, ImportError) as error:
                why = str(getattr(error, "orig", None) or error).splitlines()[0]
                raise unusable(database, why) from error
            undone.pop_all()
            return cls(engine, writer, store_file)

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction of the one who writes.

        Raises:
            SQLAlchemyError: The database is not ours any more, or can't be written. Nothing was changed.
        """
        number = 0
        if self.file is not None:
            self.file.require_in_place()
        with self.writer.begin():
            _take_for_us(self.writer)  # again: a connection that broke has lost it
            yield self.writer
            if self.file is not None:
                number = self.file.count(self.writer)
        if self.file is not None:
            self.file.keep(number)
            self._shorten_log(self.file)

    def _shorten_log(self, file: StoreFile) -> None:
        """Keeps the write-ahead log short. What was committed holds where that fails."""
        try:
            file.shorten_log(self.writer)
        except (sqlite3.Error, OSError) as error:
            logger.warning("the write-ahead log of %s can't be emptied: %s", file.path.name, error)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection to read on, from any thread."""
        with self.engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Lets go of it."""
        self.writer.close()
        self.engine.dispose()
        if self.file is not None:
            self.file.close()


def _prepare(engine: sa.Engine) -> sa.Connection:
    """The connection that all is written on, to a database that is ours and up to date."""
    connection = engine.connect()
    try:
        with connection.begin():
            _take_for_us(connection)
            _migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _file_of(url: sa.URL) -> Path | None:
    """The file that a database is kept in. None: it is on a server, or in memory."""
    name = (url.database or "").removeprefix("file:")
    if url.get_backend_name() != "sqlite" or url.host or name in ("", ":memory:"):
        return None
    return Path(name)


def _take_for_us(connection: sa.Connection) -> None:
    """Takes a database of a PostgreSQL server for as long as this connection lives; a file has its own lock.

    Raises:
        SQLAlchemyError: Another coordinator uses it.
    """
    if connection.dialect.name == "postgresql":
        taken = connection.scalar(sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK)))
        if not taken:
            raise sa.exc.InvalidRequestError(IN_USE)


def _set_pragmas(connection: Any, _record: object) -> None:
    # Text that is no UTF-8 is one damaged row, and must not end the read of all others.
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
        connection.close()  # SQLAlchemy does not know it yet
        raise


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


_VERSION: Final = sa.table("alembic_version", sa.column("version_num"))


def _migrate(connection: sa.Connection) -> None:
    """Makes the tables of a new database, and brings those of an older release up to date."""
    tables = sa.inspect(connection).get_table_names()
    if not tables:
        METADATA.create_all(connection)
        connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        connection.execute(sa.insert(_VERSION).values(version_num=NEWEST))
    elif connection.scalar(sa.select(_VERSION.c.version_num)) != NEWEST:
        # Imported late: it takes as long as all else of a start.
        from leasehold_coordinator.storage.migrate import migrate

        migrate(connection)
