"""The chain of the audit in the store: whole after failures, restarts and deletions."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold_coordinator.core.audit_hashes import FIRST, entry_hash
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.retention import prune
from leasehold_coordinator.lists import list_orders
from leasehold_coordinator.lists.filters import Filter
from leasehold_coordinator.lists.pages import PageRequest
from leasehold_coordinator.storage import audit_chain, schema
from leasehold_coordinator.storage.audit_chain import Link
from leasehold_coordinator.storage.row_digests import COLUMN, row_digest
from leasehold_coordinator.storage.rows import AuditRow, Row
from leasehold_coordinator.storage.store import Store

from tests.coordinator.bench import VAULT
from tests.coordinator.storage.test_store import Clock, with_store

DAY_S = 86_400.0
RETENTION_S = 400 * DAY_S


def row(identity: str = "user/a") -> AuditRow:
    return AuditRow(AuditEntry(identity=identity))


async def listed(store: Store) -> list[AuditEntry]:
    """All entries, oldest first."""
    page = PageRequest(1000, list_orders.AUDIT.parse("number"), None, b"")
    return list((await store.lists.audit(page, Filter(None))).items)


async def is_whole(store: Store) -> bool:
    after: Link | None = None
    while True:
        part = await store.check_audit(after)
        if part.broken is not None:
            return False
        if part.is_last:
            return True
        after = part.last


def test_entries_are_numbered_and_chained_over_restarts(tmp_path: Path) -> None:
    async def write(store: Store) -> None:
        await asyncio.gather(*(store.write(row(f"user/{number}")) for number in range(3)))

    async def check(store: Store) -> None:
        entries = await listed(store)
        assert [entry.number for entry in entries] == [1, 2, 3, 4, 5, 6]
        assert [entry.identity for entry in entries[:3]] == ["user/0", "user/1", "user/2"]
        hashes = [FIRST, *(entry.hash for entry in entries)]
        assert [entry.previous_hash for entry in entries] == hashes[:-1]
        assert all(entry.hash == entry_hash(entry) for entry in entries)
        assert await is_whole(store)

    for scenario in (write, write, check):
        with_store(tmp_path / "store.sqlite3", scenario)


def test_a_failed_write_takes_its_entry_along_and_leaves_no_gap(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.write(row("user/first"))
        bad = Row(schema.workers, {"worker_id": "w", "epoch": 2**70, "hello": b"", "has_left": False})
        results = await asyncio.gather(
            store.write(row("user/before")),
            store.write(bad, row("user/failed")),
            store.write(row("user/after")),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None), FleetError, type(None)]
        names = [entry.identity for entry in await listed(store)]
        assert names == ["user/first", "user/before", "user/after"]
        assert await is_whole(store)

    with_store(tmp_path / "store.sqlite3", scenario)


def test_an_entry_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: Store) -> None:
        await store.write(row("user/first"))
        with monkeypatch.context() as patched:
            patched.setattr(audit_chain, "read_last", lambda connection: Link(0, FIRST))
            store._writes.audit.forget()
            with pytest.raises(FleetError):
                await store.write(row("user/second"))
        await store.write(row("user/third"))
        assert [entry.identity for entry in await listed(store)] == ["user/first", "user/third"]
        assert await is_whole(store)

    with_store(tmp_path / "store.sqlite3", scenario)


def test_retention_deletes_the_oldest_and_the_rest_still_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(audit_chain, "PART_LIMIT", 2)

    async def scenario(store: Store) -> None:
        reader = Fleet(store, load_interval_s=5, vault=VAULT).reader
        for number in range(4):
            await store.write(row(f"user/{number}"))
            clock.served_s += DAY_S
        clock.served_s += RETENTION_S - 3.5 * DAY_S
        await prune(reader, 60, RETENTION_S)
        assert [entry.number for entry in await listed(store)] == [2, 3, 4]
        assert await is_whole(store)
        clock.served_s += 9 * DAY_S
        await prune(reader, 60, RETENTION_S)
        assert await listed(store) == []
        assert (await store.check_audit(None)).last.number == 4
        await store.write(row())
        assert [entry.number for entry in await listed(store)] == [5]
        assert await is_whole(store)

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_part_that_was_deleted_meanwhile_is_no_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(audit_chain, "PART_LIMIT", 2)

    async def scenario(store: Store) -> None:
        for _ in range(4):
            await store.write(row())
        clock.served_s += 10
        await store.write(row())
        part = await store.check_audit(None)
        assert (part.last.number, part.is_last) == (2, False)
        await prune(Fleet(store, load_interval_s=5, vault=VAULT).reader, 5, 5)
        rest = await store.check_audit(part.last)
        assert (rest.broken, rest.last.number) == (None, 5)

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_damaged_last_entry_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"

    async def write(store: Store) -> None:
        await store.write(row())

    async def check(store: Store) -> None:
        await write(store)
        part = await store.check_audit(None)
        assert part.broken is not None
        assert part.broken.number == 1

    with_store(path, write)
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(sa.update(schema.audit).values(record=b"\x00"))
    engine.dispose()
    with_store(path, check)


@pytest.mark.parametrize("has_digest", [True, False])
def test_an_entry_that_is_hidden_from_lists_breaks_the_chain(tmp_path: Path, has_digest: bool) -> None:
    path, table = tmp_path / "store.sqlite3", schema.audit

    async def write(store: Store) -> None:
        for name in ("user/a", "user/eve", "user/b"):
            await store.write(row(name))

    async def check(store: Store) -> None:
        part = await store.check_audit(None)
        assert part.broken is not None
        assert part.broken.number == 2

    with_store(path, write)
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        (found,) = connection.execute(sa.select(table).where(table.c.number == 2)).mappings()
        hidden = dict(found) | {"identity": "user/bob"}
        if has_digest:
            hidden[COLUMN] = row_digest(table, hidden)
        connection.execute(sa.update(table).where(table.c.number == 2).values(hidden))
    engine.dispose()
    with_store(path, check)


def test_a_full_disk_keeps_neither_change_nor_entry(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        worker = Row(schema.workers, {"worker_id": "w", "epoch": 1, "hello": b"", "has_left": False})
        await store.write(row("user/first"))
        limit_pages(store, 1)
        filler = Row(schema.workers, {"worker_id": "x", "epoch": 1, "hello": bytes(2**20), "has_left": False})
        with pytest.raises(FleetError) as error:
            await store.write(filler, row("user/filler"))
        assert error.value.metadata == {}
        assert [entry.identity for entry in await listed(store)] == ["user/first"]
        limit_pages(store, 2**30)
        await store.write(worker, row("user/second"))
        assert [entry.identity for entry in await listed(store)] == ["user/first", "user/second"]
        assert await is_whole(store)

    with_store(tmp_path / "store.sqlite3", scenario)


def limit_pages(store: Store, count: int) -> None:
    """Lets the database file grow to so many pages, as a disk of that size would (SQLITE_FULL)."""
    connection = store._database.writer.connection.driver_connection
    assert isinstance(connection, sqlite3.Connection)
    connection.execute(f"PRAGMA max_page_count={count}")
