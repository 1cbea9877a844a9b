"""The journal's SQLite file and its contents. All calls block, and belong in a thread.

Damage is detected before anything is changed. Each row has its own digest, since SQLite has none for its
pages. Commits are counted, in :mod:`leasehold_worker.commands.journal_seal` too.

The journals of a state directory are counted: a new one is made only after the last one was lost. The number
is in SQLite's ``application_id``, and in a file that stays when the journal is moved away. An older journal
is refused, since its leases are old.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeAlias, final

import msgspec
from google.protobuf.message import DecodeError
from leasehold.worker.v1.session_pb2 import CommandSpec, CommandUpdate

from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.journal_records import (
    WorkloadRecord,
    decode_hold,
    decode_intent,
    decode_standing,
    decode_workload,
    encode,
)
from leasehold_worker.commands.journal_seal import JournalSeal
from leasehold_worker.commands.journal_tables import COLUMNS, FORMAT, SEALED, bring_up_to_date, keep_copy
from leasehold_worker.commands.ledger import Entry
from leasehold_worker.errors import StartError
from leasehold_worker.files.state_files import damaged, read_number, write_text
from leasehold_worker.leasing.leases import Hold, Standing

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S: Final = 5.0

ORDINAL_FILE: Final = "last_journal"
"""The file with the number of the last journal. Its name is not among those of the journal's files."""

ORDINAL_LIMIT: Final = 2**31 - 1
"""The largest number that SQLite's ``application_id`` can have."""

Statement: TypeAlias = tuple[str, tuple[object, ...]]
"""SQL, and the values of its parameters."""


PROBE: Final[list[Statement]] = [("INSERT OR REPLACE INTO probes VALUES ('', randomblob(8))", ())]
"""A harmless write, to test whether the disk accepts it."""


def keep_command(entry: Entry) -> list[Statement]:
    """Stores a command. The end of a command removes its intent."""
    values = (
        entry.command_id,
        entry.command.SerializeToString(),
        entry.epoch,
        entry.received_s,
        entry.update.SerializeToString(),
        int(entry.cancel_requested),
        entry.acknowledged_s,
    )
    statements = [_keep("commands", *values)]
    if not entry.is_open:
        statements.append(("DELETE FROM intents WHERE command_id = ?", (entry.command_id,)))
    return statements


def keep_intent(command_id: str, intent: Intent) -> list[Statement]:
    """Stores the intent of a command, in place of the one before."""
    return [_keep("intents", command_id, encode(intent))]


def keep_workload(record: WorkloadRecord) -> list[Statement]:
    """Stores a workload."""
    return [_keep("workloads", record.workload_id, encode(record))]


def forget_command(command_id: str) -> list[Statement]:
    """Removes a command."""
    return [("DELETE FROM commands WHERE command_id = ?", (command_id,))]


def forget_workload(workload_id: str) -> list[Statement]:
    """Removes a workload."""
    return [("DELETE FROM workloads WHERE workload_id = ?", (workload_id,))]


def keep_standing(gpu_uuid: str, standing: Standing) -> list[Statement]:
    """Stores the cordon and the health verdict of a GPU, or of the worker under ""."""
    return [_keep("standings", gpu_uuid, encode(standing))]


def keep_hold(hold_id: str, hold: Hold | None) -> list[Statement]:
    """Stores a hold, or removes it."""
    if hold is None:
        return [("DELETE FROM holds WHERE hold_id = ?", (hold_id,))]
    return [_keep("holds", hold_id, encode(hold))]


def _keep(table: str, *values: object) -> Statement:
    """Writes a row with its digest."""
    numbers = ", ".join(f"?{number}" for number in range(1, len(values) + 1))
    sql = f"INSERT OR REPLACE INTO {table} VALUES ({numbers}, row_digest({numbers}))"  # noqa: S608 - ours
    return sql, values


def row_digest(*values: object) -> bytes:
    """The digest of a row, also a function of SQL. Truth values are numbers there."""
    return blake2b(msgspec.msgpack.encode(values), digest_size=16).digest()


class Contents(msgspec.Struct, frozen=True):
    """The state that an earlier run of the worker stored.

    Attributes:
        entries: The commands.
        intents: The intents of unfinished commands.
        workloads: The workloads.
        standings: Cordons and health verdicts of the GPUs, and of the worker under "".
        holds: GPUs that suspends have freed for their callers.
    """

    entries: list[Entry]
    intents: dict[str, Intent]
    workloads: list[WorkloadRecord]
    standings: dict[str, Standing]
    holds: list[Hold]


@final
class MovedError(sqlite3.OperationalError):
    """A file of the journal was deleted or replaced."""


@final
class JournalFile:
    """The open file. The lock of the state directory makes this process its only user.

    Raises:
        StartError: The file can't be read or written. It is left unchanged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        ordinal_path = path.with_name(ORDINAL_FILE)
        last = read_number(ordinal_path)
        if last >= ORDINAL_LIMIT:
            raise damaged(ordinal_path, "no number of a journal")
        self._lock = threading.Lock()
        """Held by each call: an abandoned commit may still run when the file is closed."""
        with ExitStack() as undone:
            try:
                self._seal = undone.enter_context(closing(JournalSeal(path.with_name(f"{path.name}-seal"))))
                if path.exists():
                    _verify(path, self._seal, last)
                elif self._seal.number:
                    raise sqlite3.DatabaseError(f"it is missing, and had {self._seal.number} commits")
                self._connection = undone.enter_context(closing(connect(path)))
                self._connection.execute("PRAGMA journal_mode = WAL").close()
                self._connection.execute("PRAGMA synchronous = FULL").close()
                self.contents = self._read(last + 1)
                (ordinal,) = self._connection.execute("PRAGMA application_id").fetchone()
            except (OSError, sqlite3.Error, msgspec.DecodeError, DecodeError, ValueError) as error:
                raise StartError(
                    f"the journal {path} can't be used ({error}), and it records the leases "
                    "of all GPUs. Free space on its disk, or repair the disk. If neither helps, move "
                    f"{path}* away: then the next start finds the running programs, and forgets commands"
                ) from error
            if ordinal > last:  # after the new journal is made: until then, the former one is the newest
                write_text(ordinal_path, str(ordinal))
            undone.pop_all()
        self._files = self._identify()

    def _read(self, new_ordinal: int) -> Contents:
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found < FORMAT:
            if found:  # not a new file
                keep_copy(self._connection, self._path, found)
            if found < SEALED:
                self._seal.write(0)
            bring_up_to_date(self._connection, found, new_ordinal)
        select = self._connection.execute
        (self._number,) = select("SELECT number FROM commits").fetchone()
        return Contents(
            entries=[_entry(row) for row in select("SELECT * FROM commands ORDER BY received_s, command_id")],
            intents={
                command_id: decode_intent(data)
                for command_id, data in select("SELECT command_id, intent FROM intents")
            },
            workloads=sorted(
                (decode_workload(data) for (data,) in select("SELECT record FROM workloads")),
                key=lambda record: record.start_time,
            ),
            standings={
                uuid: decode_standing(data)
                for uuid, data in select("SELECT gpu_uuid, standing FROM standings")
            },
            holds=[decode_hold(data) for (data,) in select("SELECT hold FROM holds")],
        )

    def _identify(self) -> list[tuple[int, int]]:
        """The files that have the journal's names now.

        Raises:
            OSError: A file is missing.
        """
        found = [os.stat(f"{self._path}{suffix}") for suffix in ("", "-wal", "-seal")]
        return [(file.st_dev, file.st_ino) for file in found]

    def commit(self, statements: Iterable[Statement]) -> None:
        """Runs the statements in one transaction, which is on disk before this returns.

        Raises:
            sqlite3.Error: Nothing was changed.
        """
        with self._lock:
            self._require_in_place()
            self._catch_up()
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                for sql, values in statements:
                    self._connection.execute(sql, values)
                self._connection.execute("UPDATE commits SET number = ?", (self._number + 1,))
            self._number += 1
            try:
                self._seal.write(self._number)
            except OSError as error:  # the commit is on disk; the next commit writes the seal
                logger.error("the number of a commit can't be stored beside the journal: %s", error.strerror)

    def _require_in_place(self) -> None:
        """Refuses to write into deleted or replaced files, which the next start would not find."""
        try:
            moved = self._identify() != self._files
        except OSError:
            moved = True
        if moved:
            raise MovedError(f"{self._path.name} or a file beside it was deleted or replaced")

    def _catch_up(self) -> None:
        """Brings the seal to the last commit, if the disk refused that before."""
        if self._seal.number != self._number:
            try:
                self._seal.write(self._number)
            except OSError as error:
                raise sqlite3.OperationalError(f"{self._path.name}-seal: {error.strerror}") from error

    def close(self) -> None:
        """Closes the files, after the last commit: SQLite crashes if a connection is closed under one."""
        with self._lock:
            self._connection.close()
            self._seal.close()


def connect(path: Path, mode: str = "rwc") -> sqlite3.Connection:
    """A connection that knows ``row_digest``."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.create_function("row_digest", -1, row_digest, deterministic=True)
    return connection


def _verify(path: Path, seal: JournalSeal, last: int) -> None:
    """Looks for damage through a read-only connection: a writable one would drop a damaged log at its end.

    Raises:
        sqlite3.Error: Something is damaged or missing.
    """
    with closing(connect(path, "ro")) as connection:
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found < 0:
            raise sqlite3.DatabaseError(f"its format is {found}")
        if found > FORMAT:
            raise StartError(
                f"a newer release wrote the journal {path} (format {found}, and this release reads "
                f"{FORMAT}), and it records the leases of all GPUs. Install that release again, or move "
                f"{path}* away: then the next start finds the running programs, and forgets commands"
            )
        connection.execute("PRAGMA cell_size_check = ON").close()
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        (ordinal,) = connection.execute("PRAGMA application_id").fetchone()
        if found and ordinal < last:
            raise StartError(
                f"the journal {path} is number {ordinal}, and number {last} was made after it, so its leases "
                f"are old: move {path}* away, and put the newer journal back, if you have it. Without it, "
                "the next start finds the running programs, and forgets commands. If this is the newest one, "
                f"as after a run of an older release, delete {path.with_name(ORDINAL_FILE)}"
            )
        numbers = connection.execute("SELECT number FROM commits").fetchall() if found >= SEALED else [(0,)]
        number = numbers[0][0] if numbers else None
        agrees = number is not None and seal.number is not None and number >= seal.number
        if not agrees and (found >= SEALED or seal.number):
            raise sqlite3.DatabaseError(
                f"its last commit is number {number}, and {path.name}-seal says {seal.number}"
            )
        for table, columns in COLUMNS.items() if found >= SEALED else ():
            if table == "holds" and found < FORMAT:
                continue
            wrong = connection.execute(
                f"SELECT count(*) FROM {table} WHERE digest IS NOT row_digest({columns})"  # noqa: S608 - ours
            )
            if damaged := wrong.fetchone()[0]:
                raise sqlite3.DatabaseError(f"{damaged} rows of {table} are damaged")


def _entry(row: tuple[str, bytes, int, float, bytes, int, float | None, bytes]) -> Entry:
    _, command, epoch, received_s, update, cancel_requested, acknowledged_s, _ = row
    return Entry(
        CommandSpec.FromString(command),
        epoch,
        received_s,
        CommandUpdate.FromString(update),
        bool(cancel_requested),
        acknowledged_s,
    )
