"""The SQLite file of a store: locked for one coordinator, and refused if it has lost commits."""

import errno
import fcntl
import logging
import os
import sqlite3
import stat
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, final

import sqlalchemy as sa

from leasehold_coordinator.errors import StartError
from leasehold_coordinator.storage.commit_seal import CommitSeal
from leasehold_coordinator.storage.database_url import shown_database
from leasehold_coordinator.storage.read_errors import is_corrupt, is_no_database
from leasehold_coordinator.storage.schema import commits, put_rows

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S: Final = 10

LOG_LIMIT_BYTES: Final = 64 * 2**20
"""Size of the write-ahead log from which on the store itself truncates the log."""

LOG_INTERVAL_S: Final = 10.0
"""Least time between two attempts to truncate the log."""

LOG_WAIT_S: Final = 1.0
"""How long an attempt waits for readers. Writes wait meanwhile."""

LEAST_FREE_MIB: Final = 1
"""A disk with less has no room for the files that SQLite creates beside a store."""

_WITHOUT_ROOM: Final = (
    *("disk I/O error", "database or disk is full", "unable to open database file"),
    os.strerror(errno.ENOSPC),
)
"""Messages of SQLite and the kernel for a file that can't grow. The first and third have other causes too."""

IN_USE: Final = "another coordinator uses it"

NO_NUMBER: Final = "its table commits is damaged: the number of the last commit is not an integer"


@final
@dataclass(slots=True)
class StoreFile:
    """The SQLite file of a store, locked for this process.

    Attributes:
        path: The file, with symbolic links resolved.
        lock: An open file that holds the lock.
        seal: The number of the last commit, in a file of its own.
        number: The number of the last commit, in the SQLite file.
        found: Device and inode of the store's files, as found at the start.
        shortened_s: When the write-ahead log was last truncated, by the monotonic clock.
    """

    path: Path
    lock: IO[bytes]
    seal: CommitSeal
    number: int
    found: list[tuple[int, int]] = field(default_factory=list)
    shortened_s: float = -LOG_INTERVAL_S

    def identify(self) -> list[tuple[int, int]]:
        """Device and inode of the store's files at present: database, write-ahead log and seal.

        Raises:
            OSError: A file is missing.
        """
        return [
            (one.st_dev, one.st_ino)
            for one in (os.stat(f"{self.path}{suffix}") for suffix in ("", "-wal", "-seal"))
        ]

    def require_in_place(self) -> None:
        """Refuses to write into files that a later start would not find.

        Raises:
            SQLAlchemyError: A file was deleted or replaced.
        """
        try:
            moved = self.identify() != self.found
        except OSError:
            moved = True
        if moved:
            raise sa.exc.InvalidRequestError(f"{self.path.name} or a file beside it was deleted or replaced")

    def count(self, connection: sa.Connection) -> int:
        """Adds the number of a commit to its transaction, and returns the number.

        Raises:
            SQLAlchemyError: The seal lacks the previous number, and a retry of that write failed.
        """
        if self.seal.number != self.number:
            try:
                self.seal.write(self.number)
            except OSError as error:
                raise sa.exc.InvalidRequestError(f"{self.path.name}-seal: {error.strerror}") from error
        put_rows(connection, commits, [{"commits_id": "store", "number": self.number + 1}])
        return self.number + 1

    def keep(self, number: int) -> None:
        """Writes the number of a commit to the seal. After a failure, the next commit tries again first."""
        self.number = number
        try:
            self.seal.write(number)
        except OSError as error:
            logger.error("the seal of the store can't be written: %s", error.strerror)

    def shorten_log(self, connection: sa.Connection) -> None:
        """Truncates a long write-ahead log, between two transactions.

        SQLite itself does so only when nobody reads, which may never happen.

        Raises:
            sqlite3.Error: The write failed.
        """
        now = time.monotonic()
        if now - self.shortened_s < LOG_INTERVAL_S or _size(f"{self.path}-wal") <= LOG_LIMIT_BYTES:
            return
        self.shortened_s = now
        with closing(connection.connection.cursor()) as cursor:  # SQLAlchemy would begin a transaction
            cursor.execute(f"PRAGMA busy_timeout={LOG_WAIT_S * 1000:.0f}")
            try:
                cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000}")

    def close(self) -> None:
        """Closes the seal, and releases the lock."""
        self.seal.close()
        self.lock.close()


def open_file(path: Path) -> StoreFile:
    """Locks the file of a store, and checks it for lost commits.

    Raises:
        StartError: The file can't be used, or has lost commits.
    """
    with ExitStack() as undone:
        lock = undone.enter_context(_take_file(path))
        path = path.resolve()
        beside = path.with_name(f"{path.name}-seal")
        try:
            number = _last_commit(path)
        except sqlite3.Error as error:
            # Before any change: without a seal, it may be a file of something else.
            is_damaged = is_corrupt(error) or (is_no_database(error) and beside.exists())
            raise (damaged_file(path) if is_damaged else unusable(path, str(error))) from error
        _hide(path, lock.fileno())
        try:
            seal = undone.enter_context(closing(CommitSeal(beside)))
        except OSError as error:
            raise unusable(beside, error.strerror) from error
        if number < seal.number and not _size(path) and not _size(f"{path}-wal"):
            raise StartError(
                f"the store {path} is missing or empty, and had {seal.number} commits: put it back, or "
                f"restore the newest backup with `leasehold backup restore`. Without a backup, move {path}* "
                "away and start with --store-restored; roles, tokens, revocations and the audit are lost then"
            )
        if number < seal.number:
            raise StartError(
                f"the store {path} has lost commits: it ends at number {number}, and {beside.name} at "
                f"{seal.number}. Its disk is damaged, or it is an old copy: replace it with a newer copy, or "
                f"delete {beside} to serve the remaining data"
            )
        undone.pop_all()
        return StoreFile(path, lock, seal, number)


def _size(path: str | Path) -> int:
    with suppress(FileNotFoundError):
        return os.stat(path).st_size
    return 0


def _last_commit(path: Path) -> int:
    """The number of a store's last commit. 0: a new store.

    The connection is read-only: a writable one would drop the rest of a damaged log.

    Raises:
        sqlite3.Error: The file can't be read.
    """
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as reader:
        tables = {name for (name,) in reader.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "alembic_version" not in tables:
            raise sqlite3.DataError("it is a database of another program")
        is_counted = "commits" in tables
        found = reader.execute("SELECT number FROM commits").fetchone() if is_counted else None
        if found and not isinstance(found[0], int):
            raise sqlite3.DataError(NO_NUMBER)
        return found[0] if found else 0


def _take_file(path: Path) -> IO[bytes]:
    """Locks the file of a store for this process. A new file is unreadable for other users.

    The lock is on the file itself, not on its name: two coordinators on one store would give out the same
    epochs. The lock is flock(2), which is independent of SQLite's own locks. The file must be closed last,
    since a close releases SQLite's locks.

    Raises:
        StartError: The file can't be created or locked, or other users may change it.
    """
    try:
        _check_folder(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except FileNotFoundError as error:  # it is not made: the path may have a typing error
        raise unusable(path, "its directory does not exist") from error
    except OSError as error:
        raise unusable(path, error.strerror) from error
    file = os.fdopen(descriptor, "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_file(path, os.fstat(descriptor))
    except BlockingIOError:
        file.close()
        raise unusable(path, IN_USE) from None
    except OSError as error:
        file.close()
        raise unusable(path, error.strerror) from error
    except StartError:
        file.close()
        raise
    return file


def _hide(path: Path, descriptor: int) -> None:
    """Makes the files of a store unreadable for other users.

    Raises:
        StartError: It failed.
    """
    try:
        os.fchmod(descriptor, 0o600)
        for suffix in ("-wal", "-shm"):  # an older release left both readable
            with suppress(FileNotFoundError):
                Path(f"{path}{suffix}").chmod(0o600)
    except OSError as error:
        raise unusable(path, error.strerror) from error


def _check_folder(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise unusable(folder, f"the directory belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise unusable(folder, "other users may write to the directory (chmod go-w)")


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise unusable(path, "it is not a regular file")
    if found.st_uid != os.geteuid():
        raise unusable(path, f"it belongs to user {found.st_uid}")
    if found.st_nlink != 1:  # SQLite would look for its journal under one name only
        raise unusable(path, f"it has {found.st_nlink} names (hard links); keep one of them")


def damaged_file(database: str | Path) -> StartError:
    """The error for a SQLite file with damaged pages."""
    return StartError(
        f"the database {database} is damaged: restore the newest backup with `leasehold backup restore`. "
        "Without a backup, move its files away and start with --store-restored; roles, tokens, revocations "
        "and the audit are lost then (STORAGE_DAMAGED)"
    )


def unusable(database: str | Path, why: str | None) -> StartError:
    """The error for a database with which the coordinator can't start. The text has no password of a URL."""
    shown = shown_database(database) if isinstance(database, str) else database
    lacks_room = any(text in (why or "") for text in _WITHOUT_ROOM)
    if lacks_room and "://" not in str(database) and _is_disk_full(Path(database)):
        return StartError(
            f"the database {shown} can't be used: {why}; its disk has less than {LEAST_FREE_MIB} MiB free: "
            "free space, and start again"
        )
    return StartError(
        f"the database {shown} can't be used: {why}; correct this, or name another with --database (a new "
        "one has no workloads, commands, roles or tokens)"
    )


def _is_disk_full(path: Path) -> bool:
    """Whether the disk of a file has no room for the files that SQLite creates beside it."""
    try:
        found = os.statvfs(Path(os.path.realpath(path)).parent)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < LEAST_FREE_MIB * 2**20
