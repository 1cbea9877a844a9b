"""The store on real SQLite: what was written is there, whatever happens in between."""

import asyncio
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest
from leasehold.worker.v1.session_pb2 import Hello
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.request_ids import scoped
from leasehold_coordinator.errors import FleetError, StartError
from leasehold_coordinator.fleet import retention
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.retention import prune
from leasehold_coordinator.lists import list_orders
from leasehold_coordinator.lists.filters import Filter
from leasehold_coordinator.lists.pages import Page, page_request
from leasehold_coordinator.storage import (
    database,
    record_lists,
    row_digests,
    schema,
    statements,
    store_file,
    stored_lists,
    write_queue,
)
from leasehold_coordinator.storage.database import READERS
from leasehold_coordinator.storage.migrate import migrate
from leasehold_coordinator.storage.rows import (
    AuditRow,
    OldRows,
    command_row,
    deletion_row,
    event_row,
    worker_row,
    workload_row,
)
from leasehold_coordinator.storage.schema import METADATA, NEWEST
from leasehold_coordinator.storage.statements import _old_keys
from leasehold_coordinator.storage.store import Store, newest_of_name

from tests.coordinator.bench import VAULT
from tests.coordinator.pages import all_events, as_is, page_of, some_workloads


def with_store(path: Path, scenario: Callable[[Store], Awaitable[None]]) -> None:
    async def run() -> None:
        store = Store.open(str(path))
        try:
            await scenario(store)
        finally:
            store.close()

    asyncio.run(run())


def workload(number: int, state: workload_pb2.WorkloadState.ValueType, name: str = "") -> Workload:
    made = Workload(
        workload_id=f"w-{number}",
        name=name or f"n{number}",
        worker_id="worker-1",
        status=WorkloadStatus(state=state),
    )
    made.create_time.FromSeconds(number)
    return made


def command(number: int, state: command_pb2.CommandState.ValueType, request_id: str = "") -> Command:
    made = Command(command_id=f"c-{number}", request_id=request_id, workload_id="w-1", state=state)
    made.create_time.FromSeconds(number)
    return made


RUNNING, EXITED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_EXITED
PENDING, SUCCEEDED = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_SUCCEEDED


def test_what_was_written_is_there_after_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    hello = Hello(worker_id="worker-1", name="alpha", workloads=[workload(1, RUNNING)])
    of_request = StoredCommand(command(1, PENDING, "r1"), "i1", request_digest=b"digest")

    async def write(store: Store) -> None:
        await store.write(
            worker_row(3, hello),
            workload_row(workload(1, RUNNING)),
            workload_row(workload(2, EXITED)),
            command_row(of_request),
            command_row(StoredCommand(command(2, SUCCEEDED), "i1")),
        )
        await store.write(worker_row(4, hello))

    async def read(store: Store) -> None:
        (worker,) = await store.workers()
        assert (worker.epoch, worker.hello.name, len(worker.hello.workloads)) == (4, "alpha", 0)
        assert await store.live_workloads() == [workload(1, RUNNING)]
        (stored,) = await store.open_commands()
        assert stored == await store.find_request(scoped("", "", "r1")) == of_request
        assert await store.find_command("c-2") == command(2, SUCCEEDED)
        assert await store.find_command("c-3") is None

    with_store(path, write)
    with_store(path, read)


def test_the_newest_of_a_name_is_found_and_an_id_goes_first(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        for number in (1, 2):
            await store.write(workload_row(workload(number, EXITED, "same")))
        await store.write(workload_row(workload(3, EXITED, "w-1")))
        found = await store.find_workload("same")
        assert found is not None
        assert found.workload_id == "w-2"
        found = await store.find_workload("w-1")
        assert found is not None
        assert found.workload_id == "w-1"

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_page_reads_no_more_than_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients may ask for a thousand large rows each."""
    monkeypatch.setattr(stored_lists, "PAGE_LIMIT_BYTES", 2_500)

    async def scenario(store: Store) -> None:
        large = [workload(number, EXITED) for number in range(1, 8)]
        for one in large:
            one.spec.arguments.append("x" * 1_000)
        await store.write(*map(workload_row, large))
        read: list[str] = []
        decode = store._decoder.decode

        def note(kind: Any, table: sa.Table, row: sa.Row[Any]) -> Any:
            read.append(row.workload_id)
            return decode(kind, table, row)

        monkeypatch.setattr(store._decoder, "decode", note)
        page = await some_workloads(store, 5)
        pages = [[one.workload_id for one in page.items]]
        while page.last is not None:
            page = await some_workloads(store, 5, page.last)
            pages.append([one.workload_id for one in page.items])
        assert pages == [["w-7", "w-6"], ["w-5", "w-4"], ["w-3", "w-2"], ["w-1"]]
        assert read == [workload_id for one in pages for workload_id in one]

    with_store(tmp_path / "store.sqlite3", scenario)


def test_lists_are_read_in_the_order_of_an_index(tmp_path: Path) -> None:
    """A client's list must not hold up the store's readers for as long as a sort of all rows takes."""

    async def scenario(store: Store) -> None:
        engine = store._database.engine
        queries: list[tuple[str, Any]] = []

        def note(_connection: object, _cursor: object, query: str, values: object, *_: object) -> None:
            queries.append((query, values))

        sa.event.listen(engine, "before_cursor_execute", note)
        for begin in (0, 1):
            commands = page_of(list_orders.COMMANDS, after=(5, "c-1") if begin else None)
            events = page_of(list_orders.EVENTS, after=("e-5",) if begin else None)
            for workload_id in (None, "w-1"):
                await store.lists.commands(commands, Filter(), as_is, workload_id=workload_id)
                for worker_id in (None, "worker-1"):
                    await store.lists.events(
                        events, Filter(), as_is, worker_id=worker_id, workload_id=workload_id
                    )
            after = (5, "w-1") if begin else None
            for worker_id in (None, "worker-1"):
                for include_ended in (False, True):
                    await some_workloads(store, after=after, include_ended=include_ended, worker_id=worker_id)
        sa.event.remove(engine, "before_cursor_execute", note)
        assert len(queries) == 20
        with store._database.read() as connection:
            for query, values in queries:
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).all()
                assert not [step for step in plan if step.detail == "USE TEMP B-TREE FOR ORDER BY"], query

    with_store(tmp_path / "store.sqlite3", scenario)


def test_lists_are_newest_first_and_filtered(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.write(*(workload_row(workload(n, RUNNING if n % 2 else EXITED)) for n in range(1, 6)))

        live = await some_workloads(store, include_ended=False, worker_id="worker-1")
        assert [one.workload_id for one in live.items] == ["w-5", "w-3", "w-1"]
        first = await some_workloads(store, 1, worker_id="worker-1")
        second = await some_workloads(store, 2, first.last, worker_id="worker-1")
        assert [one.workload_id for one in second.items] == ["w-4", "w-3"]

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_long_write_ahead_log_is_emptied_as_soon_as_readers_let_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would begin it anew only at a moment when nobody reads: clients could keep that from coming."""
    log = tmp_path / "store.sqlite3-wal"
    monkeypatch.setattr(store_file, "LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(store_file, "LOG_WAIT_S", 0.01)

    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))
        before_bytes = log.stat().st_size
        monkeypatch.setattr(store_file, "LOG_LIMIT_BYTES", before_bytes - 1)
        with store._database.read() as connection:
            connection.exec_driver_sql("BEGIN")
            assert connection.exec_driver_sql("SELECT count(*) FROM workloads").scalar_one() == 1
            await store.write(workload_row(workload(2, RUNNING)))
            assert log.stat().st_size > before_bytes, "a snapshot of a reader stays readable"
            connection.exec_driver_sql("ROLLBACK")
        await store.write(workload_row(workload(3, RUNNING)))
        assert log.stat().st_size == 0
        assert len(await store.live_workloads()) == 3

    with_store(tmp_path / "store.sqlite3", scenario)


def test_all_writes_fail_at_once_while_another_process_holds_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One by one, a hundred writes would wait for 10 s each."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)

    async def scenario(store: Store) -> None:
        with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as other:
            other.execute("BEGIN IMMEDIATE")
            writes = [store.write(workload_row(workload(number, RUNNING))) for number in range(20)]
            results = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(result, FleetError) for result in results)
        assert len(caplog.records) <= 2
        await store.write(workload_row(workload(1, RUNNING)))

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_write_that_fails_fails_alone(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.write(command_row(StoredCommand(command(1, PENDING, "same"))))
        good = [store.write(command_row(StoredCommand(command(n, PENDING)))) for n in range(10, 20)]
        bad = store.write(
            command_row(StoredCommand(command(2, PENDING, "same"))),
            command_row(StoredCommand(command(3, PENDING), "")),
        )
        results = await asyncio.gather(*good[:5], bad, *good[5:], return_exceptions=True)
        (error,) = [result for result in results if result is not None]
        assert isinstance(error, FleetError)
        assert error.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
        assert len(await store.open_commands()) == 11
        assert await store.find_command("c-3") is None, "a write is whole or not at all"

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_defect_in_one_write_leaves_the_others_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    async def scenario(store: Store) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(write_queue, "apply_changes", fail)
            with pytest.raises(FleetError, match="can't be written"):
                await asyncio.wait_for(store.write(workload_row(workload(1, RUNNING))), 5)
        await asyncio.wait_for(store.write(workload_row(workload(2, RUNNING))), 5)
        assert [one.workload_id for one in await store.live_workloads()] == ["w-2"]

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_value_that_the_database_has_no_room_for(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(FleetError) as error:
            await store.write(workload_row(workload(250_000_000_000, RUNNING)))
        assert error.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
        await store.write(workload_row(workload(1, RUNNING)))

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_new_database_is_one_that_was_brought_up_to_date(tmp_path: Path) -> None:
    migrated = sa.create_engine(f"sqlite:///{tmp_path / 'migrated.sqlite3'}")
    with migrated.begin() as connection:
        migrate(connection)
    Store.open(str(tmp_path / "new.sqlite3")).close()
    new = sa.create_engine(f"sqlite:///{tmp_path / 'new.sqlite3'}")
    for engine in (migrated, new):
        with engine.connect() as connection:
            context = MigrationContext.configure(connection)
            assert compare_metadata(context, METADATA) == []
            assert context.get_current_revision() == NEWEST
    with new.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    migrated.dispose()
    new.dispose()


def test_a_database_of_an_older_release_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite3"
    running = [workload(number, RUNNING) for number in range(3)]
    monkeypatch.setattr(row_digests, "_RENEWED_ROWS", 2)

    async def fill(store: Store) -> None:
        await store.write(worker_row(3, Hello(worker_id="worker-1")), *map(workload_row, running))

    async def read(store: Store) -> None:
        assert await store.live_workloads() == running
        assert [(one.epoch, one.has_left) for one in await store.workers()] == [(3, False)]

    with_store(path, fill)
    Path(f"{path}-seal").unlink()  # older than the count of commits
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        for table in METADATA.tables.keys() - {"workers", "workloads", "commands"}:
            connection.execute(sa.text(f"DROP TABLE {table}"))
        connection.execute(sa.text("DROP INDEX workloads_by_name_and_time"))
        connection.execute(sa.text("CREATE INDEX ix_workloads_name ON workloads (name)"))
        for table in ("workloads", "commands"):
            for index in ("large_by_served_s", "by_served_s", "by_time"):
                connection.execute(sa.text(f"DROP INDEX {table}_{index}"))
            connection.execute(sa.text(f"ALTER TABLE {table} DROP COLUMN served_s"))
        for table in ("workers", "workloads", "commands"):
            connection.execute(sa.text(f"ALTER TABLE {table} DROP COLUMN digest"))
        connection.execute(sa.text("ALTER TABLE commands DROP COLUMN request_digest"))
        connection.execute(sa.text("ALTER TABLE workers DROP COLUMN has_left"))
        connection.execute(sa.text("DROP INDEX commands_by_workload_and_time"))
        connection.execute(sa.text("CREATE INDEX ix_commands_workload_id ON commands (workload_id)"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0002'"))
    with_store(path, read)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()
    copy = path.with_name("store.sqlite3-tables-0002")
    assert copy.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(copy)) as older:
        assert older.execute("SELECT version_num FROM alembic_version").fetchone() == ("0002",)
        assert older.execute("SELECT count(*) FROM workloads").fetchone() == (3,)


def set_tables(path: Path, number: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (number,))


def test_a_store_of_a_newer_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(str(path)).close()
    set_tables(path, "9999")
    with pytest.raises(StartError, match=rf"a newer release wrote it \(tables 9999, .* {NEWEST}\)"):
        Store.open(str(path))
    set_tables(path, NEWEST)
    Store.open(str(path)).close()


def test_a_store_that_can_not_be_copied_is_not_migrated(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(str(path)).close()
    set_tables(path, "0013")
    (tmp_path / "store.sqlite3-tables-0013.partial").mkdir()
    with pytest.raises(StartError, match="no copy can be made before its migration"):
        Store.open(str(path))
    set_tables(path, NEWEST)
    Store.open(str(path)).close()


def test_a_migration_that_fails_halfway_changes_neither_the_store_nor_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(str(path)).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript("DROP TABLE audit; DROP TABLE audit_anchor; DROP TABLE lease_spans;")
        connection.executescript("DROP INDEX workloads_large_by_served_s")
        connection.executescript("DROP INDEX commands_large_by_served_s")
        connection.executescript("DROP INDEX workloads_by_name_and_time")
        connection.executescript("CREATE INDEX ix_workloads_name ON workloads (name)")
        connection.executescript("ALTER TABLE workers DROP COLUMN has_left")
    set_tables(path, "0012")
    create_index = Operations.create_index

    def fail(operations: Operations, name: str, *arguments: Any) -> None:
        if name == "audit_by_identity":  # the table was created before
            raise sa.exc.OperationalError("CREATE INDEX", None, OSError("disk full"))
        create_index(operations, name, *arguments)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Operations, "create_index", fail)
            with pytest.raises(StartError, match="disk full"):
                Store.open(str(path))
        for file in (path, path.with_name("store.sqlite3-tables-0012")):
            with closing(sqlite3.connect(file)) as connection:
                found = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'audit'")
                assert found.fetchone() == (0,)
    Store.open(str(path)).close()


def test_request_ids_of_an_older_release_belong_to_their_actors(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    asked = command(1, PENDING, "r1")
    asked.actor = "local/ann"

    async def fill(store: Store) -> None:
        await store.write(command_row(StoredCommand(asked)))

    async def read(store: Store) -> None:
        found = await store.find_request(scoped("local/ann", "", "r1"))
        assert found is not None
        assert found.command == asked
        assert await store.find_request(scoped("local/ben", "", "r1")) is None

    with_store(path, fill)
    Path(f"{path}-seal").unlink()
    engine = sa.create_engine(f"sqlite:///{path}")
    migration = import_module("leasehold_coordinator.storage.migrations.versions.0014_request_ids")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE commands SET request_id = 'r1'"))
        with Operations.context(MigrationContext.configure(connection)):
            migration.upgrade()
    engine.dispose()
    with_store(path, read)


def test_a_store_that_cannot_be_used_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a database, but long enough to be read as one: " + "x" * 1000)
    for path in ("/proc/no/store.sqlite3", str(tmp_path / "file"), str(tmp_path)):
        with pytest.raises(StartError, match="can't be used"):
            Store.open(path)


def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text("# not a database, but long enough to be read as one: " + "x" * 1000)
    file.chmod(0o644)
    before = file.stat()
    with pytest.raises(StartError, match="file is not a database"):
        Store.open(str(file))
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert (file.stat().st_mode, file.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_a_database_of_another_program_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "other.sqlite3"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE notes (text)")
    file.chmod(0o640)
    before = file.read_bytes()
    with pytest.raises(StartError, match="it is a database of another program"):
        Store.open(str(file))
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (before, 0o640)


@pytest.mark.parametrize(
    ("table", "is_large", "index"),
    [
        (schema.commands, None, "commands_by_served_s"),
        (schema.workloads, None, "workloads_by_served_s"),
        (schema.events, None, "events_by_served_s"),
        (schema.commands, True, "commands_large_by_served_s"),
        (schema.workloads, True, "workloads_large_by_served_s"),
        (schema.workloads, False, "workloads_by_served_s"),
    ],
    ids=str,
)
def test_what_is_old_is_found_without_looking_at_every_row(
    tmp_path: Path, table: sa.Table, is_large: bool | None, index: str
) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(str(path)).close()
    engine = sa.create_engine(f"sqlite:///{path}")
    statement = _old_keys(OldRows(table, 5, is_large), 9).compile(
        engine, compile_kwargs={"literal_binds": True}
    )
    with engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").all()
    engine.dispose()
    assert len(plan) == 1
    assert plan[0].detail.startswith("SEARCH")
    assert f" INDEX {index} " in plan[0].detail


def test_the_newest_of_a_name_are_found_without_a_look_at_the_others(tmp_path: Path) -> None:
    """Any caller may look up a name that thousands of ended workloads have."""
    path = tmp_path / "store.sqlite3"
    Store.open(str(path)).close()
    engine = sa.create_engine(f"sqlite:///{path}")
    for columns in (sa.select(schema.workloads), sa.select(schema.workloads.c.workload_id)):
        statement = newest_of_name(columns, "one", 50).compile(engine, compile_kwargs={"literal_binds": True})
        with engine.connect() as connection:
            (step,) = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").all()
        assert step.detail == "SEARCH workloads USING INDEX workloads_by_name_and_time (name=?)"
    engine.dispose()


def test_a_store_belongs_to_one_coordinator(tmp_path: Path) -> None:
    path = str(tmp_path / "store.sqlite3")
    first = Store.open(path)
    link, name = tmp_path / "link.sqlite3", tmp_path / "name.sqlite3"
    link.symlink_to(path)
    name.hardlink_to(path)
    same = (path, f"sqlite:///{path}", f"sqlite+pysqlite:///file:{path}?uri=true", str(link), str(name))
    for one in same:
        with pytest.raises(StartError, match="another coordinator uses it"):
            Store.open(one)
    first.close()
    with pytest.raises(StartError, match="2 names"):
        Store.open(path)
    name.unlink()
    Store.open(str(link)).close()
    Store.open(f"sqlite:///{path}").close()


class Clock:
    """The clocks of the host, as a test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served_s, self.wall_s = 0.0, 0.0
        monotonic_s, wall_ns = time.monotonic, time.time_ns
        monkeypatch.setattr(time, "monotonic", lambda: monotonic_s() + self.served_s)
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + round(self.wall_s * 1e9))


ENDED = (workload_row(workload(1, EXITED)), command_row(StoredCommand(command(1, SUCCEEDED))))
RETENTION_S = 30 * 86_400.0


def test_retention_counts_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def scenario(store: Store) -> None:
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        await store.write(workload_row(workload(1, RUNNING)), command_row(StoredCommand(command(1, PENDING))))
        clock.served_s += 2 * RETENTION_S
        await prune(fleet.reader, RETENTION_S)
        await store.write(*ENDED)
        clock.served_s += RETENTION_S - 60
        await prune(fleet.reader, RETENTION_S)
        assert await store.find_workload("w-1") is not None
        assert await store.find_command("c-1") is not None
        clock.served_s += 120
        await prune(fleet.reader, RETENTION_S)
        assert await store.find_workload("w-1") is None
        assert await store.find_command("c-1") is None

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_store_that_is_too_large_loses_its_oldest_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    async def scenario(store: Store) -> None:
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        await store.write(workload_row(workload(0, RUNNING)))
        for number in range(1, 7):
            ended = workload(number, EXITED)
            ended.spec.arguments.append("x" * 100_000)
            await store.write(workload_row(ended))
            clock.served_s += 10
        used_bytes = await store.used_bytes()
        assert used_bytes is not None
        assert used_bytes > 600_000
        monkeypatch.setattr(retention, "HISTORY_LIMIT_BYTES", used_bytes - 150_000)
        for module in (statements, retention):
            monkeypatch.setattr(module, "DELETE_LIMIT", 1)
        await prune(fleet.reader, RETENTION_S)
        found = await some_workloads(store)
        assert [one.workload_id for one in found.items] == ["w-6", "w-5", "w-4", "w-3", "w-0"]
        monkeypatch.setattr(retention, "HISTORY_LIMIT_BYTES", 0)
        await prune(fleet.reader, RETENTION_S)
        assert [one.workload_id for one in await store.live_workloads()] == ["w-0"]

    with_store(tmp_path / "store.sqlite3", scenario)


async def ended_counts(store: Store) -> dict[str, int]:
    """Number of ended rows, by table and for large records apart. Empty parts are left out."""
    sizes = await store.history_sizes()
    return {
        f"large {part.table}" if part.is_large else str(part.table): count
        for part, (count, _) in sizes.items()
        if count
    }


def test_large_records_take_the_place_of_no_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store) -> None:
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        for number in range(20):
            await store.write(
                workload_row(workload(number, EXITED)), command_row(StoredCommand(command(number, SUCCEEDED)))
            )
            fleet.events.refused(FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, "no"))
        await fleet.events.flush()
        for number in range(20, 30):
            large = command(number, SUCCEEDED)
            large.operation.run.spec.arguments.append("x" * 100_000)
            await store.write(command_row(StoredCommand(large)))
        monkeypatch.setattr(retention, "HISTORY_LIMIT_BYTES", 0)
        monkeypatch.setattr(retention, "PRUNE_ROUNDS", 3)
        for module in (statements, retention):
            monkeypatch.setattr(module, "DELETE_LIMIT", 2)
        await prune(fleet.reader, RETENTION_S)
        counts = {"workloads": 20, "commands": 20, "events": 20, "large commands": 4}
        assert await ended_counts(store) == counts

    with_store(tmp_path / "store.sqlite3", scenario)


def test_an_audit_of_any_size_costs_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: Store) -> None:
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        await store.write(*ENDED)
        used_bytes = await store.used_bytes()
        assert used_bytes is not None
        monkeypatch.setattr(retention, "HISTORY_LIMIT_BYTES", used_bytes + 1_000_000)
        for _ in range(10):
            await store.write(*(AuditRow(AuditEntry(message="x" * 4_000)) for _ in range(100)))
        await prune(fleet.reader, RETENTION_S)
        assert await ended_counts(store) == {"workloads": 1, "commands": 1}

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_flood_of_events_costs_no_history_of_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store) -> None:
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        for number in range(4):
            await store.write(
                workload_row(workload(number, EXITED)), command_row(StoredCommand(command(number, SUCCEEDED)))
            )
        for _ in range(40):
            fleet.events.refused(FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, "x" * 1_500))
        await fleet.events.flush()
        monkeypatch.setattr(retention, "HISTORY_LIMIT_BYTES", 0)
        monkeypatch.setattr(retention, "PRUNE_ROUNDS", 3)
        for module in (statements, retention):
            monkeypatch.setattr(module, "DELETE_LIMIT", 10)
        await prune(fleet.reader, RETENTION_S)
        assert await ended_counts(store) == {"workloads": 4, "commands": 4, "events": 10}

    with_store(tmp_path / "store.sqlite3", scenario)


def test_a_flood_of_deletions_costs_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: Store) -> None:
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        for number in range(4):
            await store.write(
                workload_row(workload(number, EXITED)), command_row(StoredCommand(command(number, SUCCEEDED)))
            )
        deleted = (Workload(workload_id=f"{number}" + "w" * 1_500) for number in range(100, 140))
        await store.write(*map(deletion_row, deleted))
        monkeypatch.setattr(retention, "HISTORY_LIMIT_BYTES", 0)
        monkeypatch.setattr(retention, "PRUNE_ROUNDS", 3)
        for module in (statements, retention):
            monkeypatch.setattr(module, "DELETE_LIMIT", 10)
        await prune(fleet.reader, RETENTION_S)
        assert await ended_counts(store) == {"workloads": 4, "commands": 4, "deletions": 10}

    with_store(tmp_path / "store.sqlite3", scenario)


def test_what_is_written_in_one_turn_of_the_loop_is_one_commit_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"

    def commits() -> int:
        with closing(sqlite3.connect(path)) as reader:
            (number,) = reader.execute("SELECT number FROM commits").fetchone()
        return int(number)

    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))
        began = commits()
        told: list[int] = []

        async def write(number: int, state: workload_pb2.WorkloadState.ValueType) -> None:
            await store.write(workload_row(workload(number, state)))
            told.append(number)

        leaving = asyncio.create_task(write(9, RUNNING))
        states = [EXITED, *[RUNNING] * 5, EXITED]
        order = [1, 2, 3, 4, 5, 6, 2]
        writing = [asyncio.create_task(write(*one)) for one in zip(order, states, strict=True)]
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(*writing)
        assert told == order
        assert commits() == began + 1
        assert [one.workload_id for one in await store.live_workloads()] == [
            "w-3",
            "w-4",
            "w-5",
            "w-6",
            "w-9",
        ]

    with_store(path, scenario)


def test_a_clock_that_jumps_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, path = Clock(monkeypatch), tmp_path / "store.sqlite3"

    async def begin(store: Store) -> None:
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        await store.write(*ENDED)
        event = fleet.events.of_workload(workload(1, EXITED))
        assert event is not None
        await store.write(event_row(event))
        await fleet.events.flush()
        clock.served_s += 86_400
        await prune(fleet.reader, RETENTION_S)

    async def go_on(store: Store) -> None:
        assert 86_400 <= store.served_s < 90_000
        fleet = Fleet(store, load_interval_s=5, vault=VAULT)
        for jump_s in (31 * 86_400, -62 * 86_400):
            clock.wall_s += jump_s
            await prune(fleet.reader, RETENTION_S)
            assert await store.find_workload("w-1") is not None
            assert await store.find_command("c-1") is not None
        clock.served_s += RETENTION_S
        await prune(fleet.reader, RETENTION_S)
        assert not await all_events(store)

    with_store(path, begin)
    with_store(path, go_on)


def test_the_log_has_no_parameters_of_statements(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(store: Store) -> None:
        await store.write(command_row(StoredCommand(command(1, PENDING, "same"))))
        with pytest.raises(FleetError):
            await store.write(command_row(StoredCommand(command(2, PENDING, "same"), "secret-of-mine")))

    with_store(tmp_path / "store.sqlite3", scenario)
    assert "can't be written" in caplog.text
    assert "secret-of-mine" not in caplog.text


def test_nobody_else_can_read_or_lock_a_store(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir(mode=0o755)
    path = folder / "store.sqlite3"
    before = os.umask(0o022)
    try:
        Store.open(str(path)).close()
        path.chmod(0o644)  # as an older release left it
        store = Store.open(str(path))
    finally:
        os.umask(before)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()}
    store.close()
    assert modes == {f"store.sqlite3{suffix}": 0o600 for suffix in ("", "-wal", "-shm", "-seal")}


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StartError, match="other users may write"):
        Store.open(str(tmp_path / "store.sqlite3"))
    tmp_path.chmod(0o1777)
    Store.open(str(tmp_path / "store.sqlite3")).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(str(path)).close()
    os.chown(path, 65534, 65534)
    with pytest.raises(StartError, match="belongs to user 65534"):
        Store.open(str(path))
    os.chown(path, 0, 0)
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(StartError, match="belongs to user 65534"):
        Store.open(str(path))


def test_a_fifo_is_no_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StartError, match="can't be used"):
        Store.open(str(tmp_path / "fifo"))


def test_many_reads_use_few_connections(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))
        found = await asyncio.gather(*(store.find_workload("w-1") for _ in range(100)))
        assert all(found)
        pool = store._database.engine.pool
        assert isinstance(pool, sa.QueuePool)
        assert pool.checkedin() + pool.checkedout() <= READERS + 1

    with_store(tmp_path / "store.sqlite3", scenario)


def test_other_reads_never_wait_for_the_pages_of_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow filters of one client once refused every other read: nobody could create a command."""
    may_end = threading.Event()

    def slow_page(*_: object) -> Page[Workload]:
        may_end.wait(30)
        return Page([], None)

    monkeypatch.setattr(record_lists, "read_page", slow_page)

    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))
        asked = page_request(ListWorkloadsRequest(), list_orders.WORKLOADS.parse(""), "")
        async with asyncio.TaskGroup() as lists:
            for _ in range(2 * READERS):
                lists.create_task(
                    store.lists.workloads(asked, Filter(), as_is, include_ended=True, worker_id=None)
                )
            await asyncio.sleep(0)  # the pages are asked for
            try:
                assert await store.find_workload("w-1")
            finally:
                may_end.set()

    with_store(tmp_path / "store.sqlite3", scenario)
