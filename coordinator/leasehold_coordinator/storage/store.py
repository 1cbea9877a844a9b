"""The store: workers, workloads, commands and events that survive a restart, in SQLite."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import sqlalchemy as sa
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.command_pb2 import Command
from leasehold.v1.lease_pb2 import LeaseSpan
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.access.certificates import ClientCertificate, Revocation
from leasehold_coordinator.access.identities import parse_identity
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.audit_chain import Link, Part, check_part, read_after
from leasehold_coordinator.storage.database import Database
from leasehold_coordinator.storage.history_sizes import (
    PARTS,
    HistoryPart,
    audit_bytes,
    count_ended,
    mean_bytes,
)
from leasehold_coordinator.storage.read_errors import damaged, is_corrupt
from leasehold_coordinator.storage.readers import Readers
from leasehold_coordinator.storage.record_decoder import RecordDecoder
from leasehold_coordinator.storage.record_lists import RecordLists
from leasehold_coordinator.storage.row_digests import is_whole
from leasehold_coordinator.storage.rows import Change, StoredWorker
from leasehold_coordinator.storage.statements import read_clocks
from leasehold_coordinator.storage.store_file import damaged_file, unusable
from leasehold_coordinator.storage.write_health import WriteHealth
from leasehold_coordinator.storage.write_queue import WriteQueue
from leasehold_coordinator.timestamps import from_unix_ns

KEY_LIMIT: Final = 500
"""Most keys of one query."""

NAMESAKE_LIMIT: Final = 50
"""Most workloads of one name among which one of an owner is looked for."""

ANY_AGE_S: Final = -1.0
"""A retention that lets rows of any age be deleted."""


@final
class Store:
    """The store. Open it with :meth:`open`. :meth:`close` waits for the writer.

    Attributes:
        health: Whether writes succeed.
        lists: Pages of its records.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._opened_s = time.monotonic()
        self._served_before_s, self._highest_time_ns = read_clocks(database)
        self._readers = Readers(database)
        self._decoder = RecordDecoder()
        self.lists = RecordLists(self._readers, self._decoder)
        self.health = WriteHealth()
        self._writes = WriteQueue(database, self.health, lambda: self.served_s)

    @classmethod
    def open(cls, database: str) -> "Store":
        """Opens and locks the database, migrates its tables, and starts the writer.

        Args:
            database: Path of a SQLite file, or a URL of SQLAlchemy.

        Raises:
            StartError: The database can't be opened or written, or another coordinator has locked it.
        """
        opened = Database.open(database)
        try:
            return cls(opened)
        except (sa.exc.SQLAlchemyError, FleetError) as error:
            opened.close()
            if is_corrupt(error):
                raise damaged_file(database) from error
            raise unusable(database, str(getattr(error, "orig", None) or error).splitlines()[0]) from error

    async def write(self, *rows: Change) -> None:
        """Writes or deletes the rows in one transaction, and returns once they are on disk.

        Raises:
            FleetError: STORAGE_UNAVAILABLE, nothing was written.
        """
        await self._writes.write(rows)

    @property
    def served_s(self) -> int:
        """Seconds in which the store was served, in total. A stop loses the time after the last write."""
        return self._served_before_s + int(time.monotonic() - self._opened_s)

    def forget_later_time(self) -> None:
        """Accepts the host's clock, although the store has seen a later time."""
        self._highest_time_ns = time.time_ns()

    @property
    def highest_time_ns(self) -> int:
        """The highest time of the host's clock that the store has seen, also before a restart."""
        self._highest_time_ns = max(self._highest_time_ns, time.time_ns())
        return self._highest_time_ns

    @property
    def writes_waiting(self) -> int:
        """Number of writes that wait for the disk."""
        return self._writes.waiting

    def close(self) -> None:
        """Waits until everything is written."""
        self._writes.close()
        self._readers.close()
        self._database.close()

    async def used_bytes(self) -> int | None:
        """Bytes in use in the database. None: not SQLite, so its administrator limits its size."""

        def count(connection: sa.Connection) -> list[int]:
            if connection.dialect.name != "sqlite":
                return []
            pragmas = ("page_count", "freelist_count", "page_size")
            return [connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() for pragma in pragmas]

        found = await self._readers.read(count)
        return (found[0] - found[1]) * found[2] if found else None

    async def history_sizes(self) -> dict[HistoryPart, tuple[int, float]]:
        """Number and mean bytes of the ended rows of each part of the history. Scans an index of each."""

        def measure(connection: sa.Connection) -> dict[HistoryPart, tuple[int, float]]:
            return {part: (count_ended(connection, part), mean_bytes(connection, part)) for part in PARTS}

        return await self._readers.read(measure, deadline_s=None)  # a large store would never get smaller

    async def audit_bytes(self) -> float:
        """Bytes of the audit, estimated."""
        return await self._readers.read(audit_bytes)

    async def workers(self) -> list[StoredWorker]:
        """Every worker.

        Raises:
            FleetError: STORAGE_DAMAGED, a row is damaged.
        """
        rows = await self._readers.select(sa.select(schema.workers), deadline_s=None)
        return [
            StoredWorker(row.epoch, self._decoder.decode(Hello, schema.workers, row), bool(row.has_left))
            for row in rows
        ]

    async def role_bindings(self) -> list[RoleBinding]:
        """Every role binding.

        Raises:
            FleetError: STORAGE_DAMAGED, a row is damaged.
        """
        rows = await self._readers.select(sa.select(schema.role_bindings), deadline_s=None)
        return [self._decoder.decode(RoleBinding, schema.role_bindings, row) for row in rows]

    async def certificates(self) -> list[ClientCertificate]:
        """Every client certificate, in the order of expiry.

        Raises:
            FleetError: STORAGE_DAMAGED, a row is damaged.
        """
        table = schema.certificates
        rows = await self._readers.select(sa.select(table).order_by(table.c.not_after_ns), deadline_s=None)
        return [self._certificate(row) for row in rows]

    def _certificate(self, row: sa.Row[Any]) -> ClientCertificate:
        if not is_whole(schema.certificates, row._mapping):
            raise damaged(schema.certificates, row)
        return ClientCertificate(
            serial=row.serial,
            identity=parse_identity(row.identity),
            fingerprint=row.fingerprint,
            predecessor=row.predecessor,
            authority=row.authority,
            not_before=from_unix_ns(row.not_before_ns),
            not_after=from_unix_ns(row.not_after_ns),
            der=row.certificate,
        )

    async def revocations(self) -> list[Revocation]:
        """Every revoked serial number and blocked identity.

        Raises:
            FleetError: STORAGE_DAMAGED, a row is damaged.
        """
        return [
            Revocation(row.subject, row.actor, row.create_time_ns)
            for row in await self.all_rows(schema.revocations)
        ]

    async def all_rows(self, table: sa.Table) -> list[sa.Row[Any]]:
        """Every row of a small table.

        Raises:
            FleetError: STORAGE_DAMAGED, a row is damaged.
        """
        rows = await self._readers.select(sa.select(table), deadline_s=None)
        for row in rows:
            if not is_whole(table, row._mapping):
                raise damaged(table, row)
        return rows

    async def live_workloads(self) -> list[Workload]:
        """Workloads that have not ended, oldest first.

        Raises:
            FleetError: STORAGE_DAMAGED, a row is damaged.
        """
        table = schema.workloads
        rows = await self._readers.select(_not_ended(table), deadline_s=None)
        return [self._decoder.decode(Workload, table, row) for row in rows]

    async def open_commands(self) -> list[StoredCommand]:
        """Commands that have not ended, oldest first.

        Raises:
            FleetError: STORAGE_DAMAGED, a row is damaged.
        """
        rows = await self._readers.select(_not_ended(schema.commands), deadline_s=None)
        return [self._stored_command(row) for row in rows]

    async def find_workload(self, id_or_name: str, owner: str = "") -> Workload | None:
        """The workload with this id, or the newest with this name.

        Among the newest 50 with the name, one of the owner goes first.

        Raises:
            FleetError: STORAGE_DAMAGED, its row is damaged.
        """
        return await self._readers.read(
            partial(self._find_workload, table=schema.workloads, id_or_name=id_or_name, owner=owner)
        )

    def _find_workload(
        self, connection: sa.Connection, table: sa.Table, id_or_name: str, owner: str
    ) -> Workload | None:
        by_id = connection.execute(sa.select(table).where(table.c.workload_id == id_or_name)).first()
        if by_id is not None:
            return self._decoder.decode(Workload, table, by_id)
        newest: Workload | None = None
        with connection.execute(newest_of_name(sa.select(table), id_or_name, NAMESAKE_LIMIT)) as rows:
            for row in rows:  # one by one: the first is of the owner in most cases
                decode = self._decoder.decode if newest is None else self._decoder.decode_if_whole
                one = decode(Workload, table, row)
                newest = newest or one
                if one is not None and one.owner == owner:
                    return one
        return newest

    async def find_workloads(
        self, workload_ids: Sequence[str], keep: Callable[[Workload], Workload] = lambda record: record
    ) -> list[Workload]:
        """The workloads with these ids. Damaged rows are skipped, since reports of workers replace them.

        Args:
            workload_ids: The ids. A peer may choose them.
            keep: Reduces a record to what its reader needs, in the thread that reads. Records are read one
                by one, so no other part of them takes memory.
        """
        table = schema.workloads

        def read(connection: sa.Connection, keys: Sequence[str]) -> list[Workload]:
            rows = connection.execute(sa.select(table).where(table.c.workload_id.in_(keys)))
            found = (self._decoder.decode_if_whole(Workload, table, row) for row in rows)
            return [keep(record) for record in found if record is not None]

        found: list[Workload] = []
        for first in range(0, len(workload_ids), KEY_LIMIT):
            keys = workload_ids[first : first + KEY_LIMIT]
            found += await self._readers.read(partial(read, keys=keys))
        return found

    async def find_deletions(self, workload_ids: Sequence[str]) -> list[str]:
        """The ids, among these, of workloads whose records a client deleted."""
        key = schema.deletions.c.workload_id
        found: list[str] = []
        for first in range(0, len(workload_ids), KEY_LIMIT):
            keys = workload_ids[first : first + KEY_LIMIT]
            rows = await self._readers.select(sa.select(key).where(key.in_(keys)))
            found += [row.workload_id for row in rows]
        return found

    async def find_command(self, command_id: str) -> Command | None:
        """The command with this id.

        Raises:
            FleetError: STORAGE_DAMAGED, its row is damaged.
        """
        found = await self._one_command(schema.commands.c.command_id == command_id)
        return found.command if found is not None else None

    async def find_request(self, request_id: str) -> StoredCommand | None:
        """The command that a request created, with the digest of the request.

        Args:
            request_id: The id with its identity: :func:`~leasehold_coordinator.core.request_ids.scoped`.

        Raises:
            FleetError: STORAGE_DAMAGED, its row is damaged.
        """
        return await self._one_command(schema.commands.c.request_id == request_id)

    async def _one_command(self, condition: sa.ColumnElement[bool]) -> StoredCommand | None:
        rows = await self._readers.select(sa.select(schema.commands).where(condition))
        return self._stored_command(rows[0]) if rows else None

    def _stored_command(self, row: sa.Row[Any]) -> StoredCommand:
        return StoredCommand(
            self._decoder.decode(Command, schema.commands, row),
            row.instance_id,
            row.accepted,
            row.cancel_requested,
            request_digest=row.request_digest or b"",
        )

    async def workload_ids(self, name: str) -> frozenset[str]:
        """Ids of the workloads with this name, the newest 500."""
        ids = sa.select(schema.workloads.c.workload_id)
        rows = await self._readers.select(newest_of_name(ids, name, KEY_LIMIT))
        return frozenset(row.workload_id for row in rows)

    async def open_lease_spans(self) -> list[LeaseSpan]:
        """Lease spans that have not ended, oldest first.

        Raises:
            FleetError: STORAGE_UNAVAILABLE.
        """
        table = schema.lease_spans
        open_ones = sa.select(table).where(table.c.end_time_ns == schema.OPEN_END_NS)
        rows = await self._readers.select(open_ones.order_by(table.c.span_id), deadline_s=None)
        found = (self._decoder.decode_if_whole(LeaseSpan, table, row) for row in rows)
        return [span for span in found if span is not None]

    async def last_span_ends(self, workload_ids: Sequence[str]) -> dict[str, int]:
        """The latest end of a lease span of some workloads in nanoseconds, by id.

        A workload without an ended span is missing.

        Raises:
            FleetError: STORAGE_UNAVAILABLE.
        """
        columns = schema.lease_spans.c
        found: dict[str, int] = {}
        for first in range(0, len(workload_ids), KEY_LIMIT):
            keys = workload_ids[first : first + KEY_LIMIT]
            ended = columns.workload_id.in_(keys) & (columns.end_time_ns < schema.OPEN_END_NS)
            latest = sa.select(columns.workload_id, sa.func.max(columns.end_time_ns)).where(ended)
            rows = await self._readers.select(latest.group_by(columns.workload_id), deadline_s=None)
            found.update((row[0], row[1]) for row in rows)
        return found

    @property
    def last_audit_number(self) -> int | None:
        """Number of the last entry of the audit that this process has committed. None: it committed none."""
        committed = self._writes.audit.committed
        return None if committed is None else committed.number

    async def audit_after(self, last: Link, limit: int) -> list[AuditEntry] | None:
        """The entries of the audit after one, oldest first. None: the store has another chain."""
        return await self._readers.read(lambda connection: read_after(connection, last, limit))

    async def check_audit(self, after: Link | None) -> Part:
        """Recomputes the hashes of the next part of the audit.

        Args:
            after: The last entry of the part before. None: the part is the first.
        """
        committed = self._writes.audit.committed
        return await self._readers.read_page(lambda connection: check_part(connection, after, committed))


def _not_ended(table: sa.Table) -> sa.Select[Any]:
    """Rows that are unfinished by at least one of two columns, oldest first.

    With only one column, one damaged bit would hide a running workload or an unfinished command.
    """
    is_open = sa.or_(~table.c.ended, table.c.served_s.is_(None))
    return sa.select(table).where(is_open).order_by(table.c.create_time_ns)


def newest_of_name(columns: sa.Select[Any], name: str, limit: int) -> sa.Select[Any]:
    """The newest workloads with a name, newest first."""
    table = schema.workloads
    return columns.where(table.c.name == name).order_by(table.c.create_time_ns.desc()).limit(limit)
