"""The database under the store: opened for one coordinator alone, and brought up to date.

All is written on one connection. Two coordinators on one database would give out the same epochs.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, final

import sqlalchemy as sa

from leasehold_coordinator.errors import StartError
from leasehold_coordinator.schema import METADATA, NEWEST

BUSY_TIMEOUT_S: Final = 10
READERS: Final = 4
"""Connections that are read on at once; each has a cache of its own."""

CACHE_KIB: Final = 1024
"""What each connection to a SQLite file keeps in memory of it."""

IN_USE: Final = "another coordinator uses it"

ADVISORY_LOCK: Final = 0x6C65617365686F6C
"""The key under which PostgreSQL keeps a database for one coordinator."""


@final
@dataclass(frozen=True, slots=True)
class Database:
    """An open database. Open it with :meth:`open`."""

    engine: sa.Engine
    writer: sa.Connection
    lock: IO[bytes] | None

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
                lock = undone.enter_context(_take_file(path)) if path is not None else None
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


def _take_file(path: Path) -> IO[bytes]:
    """Takes the file of a store for this process alone, and keeps everybody else from reading it.

    The lock is on the file itself, whatever its name: two coordinators on one store would give out the same
    epochs. It is flock(2), which SQLite's own locks do not touch. The file is closed last, since a close
    releases SQLite's locks.

    Raises:
        StartError: It can't be made or locked, or others may change it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    file = os.fdopen(descriptor, "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_file(path, os.fstat(descriptor))
        os.fchmod(descriptor, 0o600)
        for suffix in ("-wal", "-shm"):  # an older release made them readable
            with suppress(FileNotFoundError):
                Path(f"{path.resolve()}{suffix}").chmod(0o600)
    except BlockingIOError:
        file.close()
        raise _unusable(path, IN_USE) from None
    except OSError as error:
        file.close()
        raise _unusable(path, error.strerror) from error
    except StartError:
        file.close()
        raise
    return file


def _check_folder(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise _unusable(folder, f"the directory belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise _unusable(folder, "other users may write to the directory (chmod go-w)")


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _unusable(path, "it is not a regular file")
    if found.st_uid != os.geteuid():
        raise _unusable(path, f"it belongs to user {found.st_uid}")
    if found.st_nlink != 1:  # SQLite would look for its journal under one name only
        raise _unusable(path, f"it has {found.st_nlink} names (hard links); keep one of them")


def _set_pragmas(connection: Any, _record: object) -> None:
    try:
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={BUSY_TIMEOUT_S * 1000}",
            f"cache_size=-{CACHE_KIB}",
        ):
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
