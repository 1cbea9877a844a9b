"""The tables of the journal's SQLite file, and the way from older formats."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

FORMAT: Final = 4
"""Version of the file's format, kept in SQLite's ``user_version``."""

SEALED: Final = 3
"""The first format whose commits are counted, and whose rows have digests."""

_TABLES: Final = """
CREATE TABLE commands (
    command_id TEXT PRIMARY KEY,
    command BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    received_s REAL NOT NULL,
    command_update BLOB NOT NULL,
    cancel_requested INTEGER NOT NULL,
    acknowledged_s REAL
) WITHOUT ROWID;
CREATE TABLE intents (command_id TEXT PRIMARY KEY, intent BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE workloads (workload_id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE probes (probe_id TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID;
"""

_STANDINGS: Final = """
CREATE TABLE standings (gpu_uuid TEXT PRIMARY KEY, standing BLOB NOT NULL) WITHOUT ROWID;
"""
"""Added by format 2."""

_COMMITS: Final = """
CREATE TABLE commits (commit_id INTEGER PRIMARY KEY CHECK (commit_id = 0), number INTEGER NOT NULL);
INSERT INTO commits VALUES (0, 0);
"""
"""Added by format 3, as were the digests."""

_HOLDS: Final = """
CREATE TABLE holds (hold_id TEXT PRIMARY KEY, hold BLOB NOT NULL, digest BLOB) WITHOUT ROWID;
"""
"""Added by format 4."""

COLUMNS: Final = {
    "commands": "command_id, command, epoch, received_s, command_update, cancel_requested, acknowledged_s",
    "intents": "command_id, intent",
    "workloads": "workload_id, record",
    "standings": "gpu_uuid, standing",
    "holds": "hold_id, hold",
}
"""The columns that the digest of a row covers, by table."""

_DIGESTS: Final = "".join(
    f"ALTER TABLE {table} ADD COLUMN digest BLOB; UPDATE {table} SET digest = row_digest({columns});"  # noqa: S608 - ours
    for table, columns in COLUMNS.items()
    if table != "holds"
)


def keep_copy(connection: sqlite3.Connection, path: Path, found: int) -> None:
    """Copies a file of an older format before its change. The format is in the name of the copy.

    Args:
        connection: A connection to the file.
        path: The file.
        found: Its format.

    Raises:
        OSError: The copy can't be written.
        sqlite3.Error: The same, or the file can't be read.
    """
    copy, partial = (path.with_name(f"{path.name}-format-{found}{suffix}") for suffix in ("", ".partial"))
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(sqlite3.connect(partial)) as target:
            connection.backup(target)
            target.execute("PRAGMA journal_mode = DELETE").close()  # one file, without a log beside it
        os.replace(partial, copy)
    finally:
        partial.unlink(missing_ok=True)  # a full disk needs its room


def bring_up_to_date(connection: sqlite3.Connection, found: int, ordinal: int) -> None:
    """Creates the tables of a new file, and those that an older format lacks, in one transaction.

    Args:
        connection: A connection that knows ``row_digest``.
        found: The format of the file. 0: it is new.
        ordinal: The number of the last journal. A new file gets it.

    Raises:
        sqlite3.Error: Nothing was changed.
    """
    older = {
        0: _TABLES + _STANDINGS + _DIGESTS + _COMMITS + f"PRAGMA application_id = {ordinal};",
        1: _STANDINGS + _DIGESTS + _COMMITS,
        2: _DIGESTS + _COMMITS,
        3: "",
    }[found]
    connection.executescript(f"BEGIN; {older} {_HOLDS} PRAGMA user_version = {FORMAT}; COMMIT;")
