"""Turns errors of the store into refusals."""

import sqlite3
from typing import Any, Final

import sqlalchemy as sa
from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError

KEY_SHOWN: Final = 140
"""Most characters of a damaged row's key in a message."""


def damaged(table: sa.Table, row: sa.Row[Any]) -> FleetError:
    """The refusal for a damaged row, with its table, its key and the remedy."""
    (key,) = table.primary_key.columns
    shown = ascii(row._mapping[key.name])[:KEY_SHOWN]
    return FleetError(
        errors_pb2.ERROR_REASON_STORAGE_DAMAGED,
        f"row {shown} of table {table.name} in the coordinator's store is damaged: check the disk, then put "
        "a backup of the store in place, or delete the row",
        table=table.name,
        key=shown,
    )


def is_corrupt(error: Exception) -> bool:
    """Whether SQLite found pages of the file damaged."""
    return _code(error) == sqlite3.SQLITE_CORRUPT


def is_no_database(error: Exception) -> bool:
    """Whether the file does not begin as one of SQLite."""
    return _code(error) == sqlite3.SQLITE_NOTADB


def corrupt() -> FleetError:
    """The refusal for a store whose file is damaged."""
    return FleetError(
        errors_pb2.ERROR_REASON_STORAGE_DAMAGED,
        "the file of the coordinator's store is damaged: check the disk, then restore the newest backup with "
        "`leasehold backup restore`",
    )


def is_locked(error: Exception) -> bool:
    """Whether another process has locked the SQLite file. Each retry would wait for 10 s."""
    return _code(error) == sqlite3.SQLITE_BUSY


def is_refused(error: Exception) -> bool:
    """Whether the disk or the server refused the write. Otherwise the written values were at fault."""
    return isinstance(error, sa.exc.OperationalError | sa.exc.InvalidRequestError) or (
        type(error) is sa.exc.DatabaseError
    )


def unavailable(done: str) -> FleetError:
    """The refusal STORAGE_UNAVAILABLE. The caller logs the cause."""
    return FleetError(
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        f"the coordinator's store can't be {done}: look at the coordinator's log and at the disk",
    )


def _code(error: Exception) -> int:
    """The primary result code of SQLite. 0: the error is of something else."""
    cause = getattr(error, "orig", None) or error
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF
