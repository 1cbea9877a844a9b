"""The journal's file: SQLite, and what is in it. Everything here blocks, and is called in a thread."""

import sqlite3
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, TypeAlias, final

import msgspec
from google.protobuf.message import DecodeError
from leasehold.v1.command_pb2 import Command
from leasehold.v1.worker_session_pb2 import CommandUpdate

from leasehold_worker.command_ledger import Entry
from leasehold_worker.errors import StartError
from leasehold_worker.intents import Intent
from leasehold_worker.journal_records import (
    WorkloadRecord,
    decode_intent,
    decode_standing,
    decode_workload,
    encode,
)
from leasehold_worker.leases import Standing

FORMAT: Final = 2
"""Version of what is in the file, kept in SQLite's ``user_version``."""

BUSY_TIMEOUT_S: Final = 5.0

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
"""Came with format 2."""

Statement: TypeAlias = tuple[str, tuple[object, ...]]
"""SQL, and the values of its parameters."""


PROBE: Final[list[Statement]] = [("INSERT OR REPLACE INTO probes VALUES ('', randomblob(8))", ())]
"""Writes something that nobody needs, to see whether the disk takes it."""


def keep_command(entry: Entry) -> list[Statement]:
    """Keeps a command. Once it has ended, what it meant to do no longer matters."""
    values = (
        entry.command_id,
        entry.command.SerializeToString(),
        entry.epoch,
        entry.received_s,
        entry.update.SerializeToString(),
        entry.cancel_requested,
        entry.acknowledged_s,
    )
    statements: list[Statement] = [("INSERT OR REPLACE INTO commands VALUES (?, ?, ?, ?, ?, ?, ?)", values)]
    if not entry.is_open:
        statements.append(("DELETE FROM intents WHERE command_id = ?", (entry.command_id,)))
    return statements


def keep_intent(command_id: str, intent: Intent) -> list[Statement]:
    """Keeps what a command is about to do, in the place of what it did before."""
    return [("INSERT OR REPLACE INTO intents VALUES (?, ?)", (command_id, encode(intent)))]


def keep_workload(record: WorkloadRecord) -> list[Statement]:
    """Keeps a workload."""
    return [("INSERT OR REPLACE INTO workloads VALUES (?, ?)", (record.workload_id, encode(record)))]


def forget_command(command_id: str) -> list[Statement]:
    """Takes a command out."""
    return [("DELETE FROM commands WHERE command_id = ?", (command_id,))]


def forget_workload(workload_id: str) -> list[Statement]:
    """Takes a workload out."""
    return [("DELETE FROM workloads WHERE workload_id = ?", (workload_id,))]


def keep_standing(gpu_uuid: str, standing: Standing) -> list[Statement]:
    """Keeps what is held against a GPU, or under "" against the worker."""
    return [("INSERT OR REPLACE INTO standings VALUES (?, ?)", (gpu_uuid, encode(standing)))]


class Contents(msgspec.Struct, frozen=True):
    """The state that an earlier start of the worker kept.

    Attributes:
        entries: Its commands.
        intents: What open ones were about to do.
        workloads: Its workloads.
        standings: What was held against its GPUs, and under "" against itself.
    """

    entries: list[Entry]
    intents: dict[str, Intent]
    workloads: list[WorkloadRecord]
    standings: dict[str, Standing]


@final
class JournalFile:
    """The open file, of which the state directory's lock makes us the only user.

    Raises:
        StartError: It can't be read or written. It is left as it is.
    """

    def __init__(self, path: Path) -> None:
        with ExitStack() as undone:
            try:
                self._connection = undone.enter_context(closing(_connect(path)))
                self._connection.execute("PRAGMA journal_mode = WAL").close()
                self._connection.execute("PRAGMA synchronous = FULL").close()
                self.contents = self._read()
            except (sqlite3.Error, msgspec.DecodeError, DecodeError) as error:
                raise StartError(
                    f"the journal {path} can't be used ({error}): it holds which workload has which GPU, so "
                    "mend its disk, or end the workloads by hand and then move the file away"
                ) from error
            undone.pop_all()

    def _read(self) -> Contents:
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found == 0:
            self._connection.executescript(
                f"BEGIN; {_TABLES} {_STANDINGS} PRAGMA user_version = {FORMAT}; COMMIT;"
            )
        elif found == 1:
            self._connection.executescript(f"BEGIN; {_STANDINGS} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif found != FORMAT:
            raise sqlite3.DatabaseError(f"its format is {found}, and this version reads {FORMAT}")
        (verdict,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        select = self._connection.execute
        return Contents(
            entries=[_entry(row) for row in select("SELECT * FROM commands ORDER BY received_s, command_id")],
            intents={command_id: decode_intent(data) for command_id, data in select("SELECT * FROM intents")},
            workloads=sorted(
                (decode_workload(data) for (data,) in select("SELECT record FROM workloads")),
                key=lambda record: record.start_time,
            ),
            standings={uuid: decode_standing(data) for uuid, data in select("SELECT * FROM standings")},
        )

    def commit(self, statements: Iterable[Statement]) -> None:
        """Carries out the statements in one transaction, on disk before this returns.

        Raises:
            sqlite3.Error: Nothing was changed.
        """
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                self._connection.execute(sql, values)

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def _entry(row: tuple[str, bytes, int, float, bytes, int, float | None]) -> Entry:
    _, command, epoch, received_s, update, cancel_requested, acknowledged_s = row
    return Entry(
        Command.FromString(command),
        epoch,
        received_s,
        CommandUpdate.FromString(update),
        bool(cancel_requested),
        acknowledged_s,
    )
