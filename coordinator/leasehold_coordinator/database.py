"""The database under the store: opened for one coordinator alone, and brought up to date.

All is written on one connection. Two coordinators on one database would give out the same epochs.
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, final

import sqlalchemy as sa

from leasehold_coordinator.errors import StartError
from leasehold_coordinator.schema import METADATA, NEWEST

BUSY_TIMEOUT_S: Final = 10
IN_USE: Final = "another coordinator uses it"

ADVISORY_LOCK: Final = 0x6C65617365686F6C
"""The key under which PostgreSQL keeps a database for one coordinator."""


@final
@dataclass(frozen=True, slots=True)
class Database:
    """An open database. Open it with :meth:`open`."""

    engine: sa.Engine
    writer: sa.Connection
    lock: IO[str] | None

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
                url = sa.URL.create("sqlite", database=str(Path(database).expanduser())) if is_path else None
                engine = sa.create_engine(url or database, hide_parameters=True)  # records have secrets
                undone.callback(engine.dispose)
                path = _file_of(engine.url)
                lock = undone.enter_context(_lock_file(path)) if path is not None else None
                if engine.dialect.name == "sqlite":
                    sa.event.listen(engine, "connect", _set_pragmas)
                opened = cls(engine, _prepare(engine), lock)
            except (sa.exc.SQLAlchemyError, ImportError) as error:
                why = str(getattr(error, "orig", None) or error).splitlines()[0]
                raise _unusable(database, why) from error
            undone.pop_all()
            return opened

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction of the one who writes. It raises SQLAlchemyError where the database is not ours."""
        with self.writer.begin():
            _take_for_us(self.writer)  # again: a connection that broke has lost it
            yield self.writer

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection to read on, from any thread."""
        with self.engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Lets go of it."""
        self.writer.close()
        self.engine.dispose()
        if self.lock is not None:
            self.lock.close()


def _unusable(database: str | Path, why: str | None) -> StartError:
    return StartError(f"the database {database} can't be used: {why}; choose another with --database")


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


def _lock_file(path: Path) -> IO[str]:
    """Takes the store for this process alone: two coordinators on one would give out the same epochs."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise _unusable(path, IN_USE) from None
    return lock


def _set_pragmas(connection: Any, _record: object) -> None:
    try:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_TIMEOUT_S * 1000}"):
            connection.execute(f"PRAGMA {pragma}").close()
    except BaseException:
        connection.close()  # SQLAlchemy does not know it yet
        raise


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
        from leasehold_coordinator.migrating import migrate

        migrate(connection)
