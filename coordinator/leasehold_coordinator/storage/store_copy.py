"""A copy of a store's SQLite file, made while a coordinator serves it."""

import errno
import os
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from leasehold_coordinator.storage.store_file import BUSY_TIMEOUT_S, unusable

_WRITE_ERRORS: Final = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR_WRITE: errno.EIO}
"""SQLite's errors of the copy's disk, since only the copy is written."""


def copy_store(path: Path, copy: Path) -> tuple[int, str]:
    """Copies the state of a store at one moment. Writes to the store go on meanwhile.

    Args:
        path: The SQLite file.
        copy: The new file, with mode 0600.

    Returns:
        The number of the last commit in the copy, and the migration that made its tables.

    Raises:
        StartError: The store can't be read, or is damaged.
        OSError: The copy can't be written.
    """
    try:
        with closing(copy_file(path, copy)) as target:
            return check_copy(target)
    except sqlite3.Error as error:
        raise unusable(path, str(error)) from error


def copy_file(path: Path, copy: Path) -> sqlite3.Connection:
    """As :func:`copy_store`, for a store of any release. Returns a connection to the copy.

    Raises:
        sqlite3.Error: The store can't be read, or is damaged.
        OSError: The copy can't be written.
    """
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    # Not "mode=ro", which can't read the write-ahead log of a store that nobody serves.
    source = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S)
    with closing(source), ExitStack() as undone:
        target = undone.enter_context(closing(sqlite3.connect(copy)))
        try:
            source.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
        except sqlite3.OperationalError as error:
            number = _WRITE_ERRORS.get(error.sqlite_errorcode)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), str(copy)) from error
        undone.pop_all()
        return target


def check_copy(connection: sqlite3.Connection) -> tuple[int, str]:
    """The number of the last commit of a copy, and the migration that made its tables.

    Raises:
        sqlite3.Error: The copy is damaged, or is no store.
    """
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {found}")
    number = connection.execute("SELECT number FROM commits").fetchone()
    migration = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    if migration is None or (number is not None and not isinstance(number[0], int)):
        raise sqlite3.DatabaseError("it is not a whole store of a coordinator")
    return number[0] if number else 0, str(migration[0])
