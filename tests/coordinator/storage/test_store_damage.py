"""A store that lost something is noticed, and never served as if it was whole."""

import asyncio
import errno
import os
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import Hello
from leasehold_coordinator.api.command_service import CommandService
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.request_ids import scoped
from leasehold_coordinator.errors import FleetError, StartError
from leasehold_coordinator.storage.commit_seal import CommitSeal
from leasehold_coordinator.storage.rows import clock_row, command_row, worker_row, workload_row
from leasehold_coordinator.storage.store import Store

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.conftest import run_coordinator
from tests.coordinator.pages import some_workloads
from tests.coordinator.storage.test_store import (
    EXITED,
    PENDING,
    RUNNING,
    SUCCEEDED,
    command,
    with_store,
    workload,
)

FILES = ("store.sqlite3", "store.sqlite3-wal", "store.sqlite3-seal")


def copy_of_killed(folder: Path, count: int = 5) -> Path:
    """A store as a kill -9 leaves it after so many commits: all of them in the log."""
    copy = folder / "copy"
    copy.mkdir(mode=0o700)

    async def scenario(store: Store) -> None:
        for number in range(count):
            await store.write(workload_row(workload(number, RUNNING)))
        for name in FILES:
            if (folder / name).exists():
                shutil.copy(folder / name, copy / name)

    with_store(folder / FILES[0], scenario)
    return copy / FILES[0]


def names(path: Path) -> list[str]:
    found: list[Workload] = []

    async def scenario(store: Store) -> None:
        found.extend(await store.live_workloads())

    with_store(path, scenario)
    return [one.name for one in found]


def execute(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_bit, cut, Path.unlink], ids=["bit", "cut", "gone"])
def test_lost_commits_keep_a_coordinator_from_starting(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = copy_of_killed(tmp_path)
    damage(Path(f"{path}-wal"))
    before = {one.name: one.read_bytes() for one in path.parent.iterdir()}
    with pytest.raises(StartError, match="has lost commits: it ends at number"):
        Store.open(str(path))
    after = {one.name: one.read_bytes() for one in path.parent.iterdir()}
    assert {name: after[name] for name in before} == before, "a damaged store is left as it is"


@pytest.mark.parametrize("damage", ["pages", "end", "begin"])
def test_a_damaged_file_names_the_way_back(tmp_path: Path, damage: str) -> None:
    """The pages are found at the first reads, or at the opening."""
    path = copy_of_killed(tmp_path, 50)
    execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    if damage == "end":
        del data[20_000:]
    elif damage == "begin":
        data[:14] = b"garbagegarbage"
    else:
        data[8_192:] = bytes(255 for _ in data[8_192:])
    path.write_bytes(data)

    async def start(use: Callable[[Store], Awaitable[object]]) -> None:
        store = Store.open(str(path))
        try:
            await use(store)
        finally:
            store.close()

    for use in (Store.live_workloads, lambda store: store.write(workload_row(workload(1, RUNNING)))):
        with pytest.raises((StartError, FleetError), match=r"is damaged: .*`leasehold backup restore`"):
            asyncio.run(start(use))


def test_a_store_that_is_gone_is_not_begun_anew(tmp_path: Path) -> None:
    path = copy_of_killed(tmp_path)
    for name in FILES[:2]:
        (path.parent / name).unlink()
    with pytest.raises(StartError, match=r"is missing or empty, and had \d+ commits: put it back"):
        Store.open(str(path))


def test_a_store_without_its_seal_is_served_as_it_is(tmp_path: Path) -> None:
    path = copy_of_killed(tmp_path)
    Path(f"{path}-seal").unlink()
    assert len(names(path)) == 5


def test_a_crash_before_the_seal_was_written_loses_nothing(tmp_path: Path) -> None:
    path = copy_of_killed(tmp_path)
    seal = Path(f"{path}-seal")
    data = seal.read_bytes()
    newest = 512 * (5 % 2)
    seal.write_bytes(data[:newest] + bytes(24) + data[newest + 24 :])
    assert len(names(path)) == 5
    assert len(names(path)) == 5


def test_a_seal_that_a_power_loss_left_behind_does_no_harm(tmp_path: Path) -> None:
    path = copy_of_killed(tmp_path)
    seal = CommitSeal(Path(f"{path}-seal"))
    seal.write(1)
    seal.write(2)
    seal.close()
    assert len(names(path)) == 5
    Path(f"{path}-wal").write_bytes(b"")
    path.unlink()
    with pytest.raises(StartError, match="is missing or empty, and had 2 commits"):
        Store.open(str(path))


def test_a_seal_waits_for_the_disk_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    now_s = [100.0]
    monkeypatch.setattr("leasehold_coordinator.storage.commit_seal.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("leasehold_coordinator.storage.commit_seal.os.fdatasync", synced.append)
    seal = CommitSeal(tmp_path / "seal")
    for number in range(3):
        seal.write(number)
    assert not synced
    now_s[0] += 1.0
    seal.write(3)
    seal.write(4)
    assert len(synced) == 1
    seal.close()
    assert len(synced) == 2


@pytest.mark.parametrize("gone", FILES)
def test_a_store_that_was_deleted_takes_nothing_more(tmp_path: Path, gone: str) -> None:
    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))
        (tmp_path / gone).rename(tmp_path / "elsewhere")
        with pytest.raises(FleetError) as error:
            await store.write(workload_row(workload(2, RUNNING)))
        assert error.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
        (tmp_path / "elsewhere").rename(tmp_path / gone)
        await store.write(workload_row(workload(3, RUNNING)))

    with_store(tmp_path / FILES[0], scenario)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE workloads SET record = x'ff01'",
        pytest.param("UPDATE workloads SET record = 'text'", marks=pytest.mark.long),
        pytest.param("UPDATE workloads SET worker_id = 'worker-2'", marks=pytest.mark.long),
        pytest.param("UPDATE workloads SET ended = 1", marks=pytest.mark.long),
        "UPDATE workloads SET served_s = 3",
        pytest.param("UPDATE workloads SET name = CAST(x'ff' AS TEXT)", marks=pytest.mark.long),
        pytest.param("UPDATE workloads SET digest = NULL", marks=pytest.mark.long),
        pytest.param("UPDATE workers SET epoch = 'abc'", marks=pytest.mark.long),
        pytest.param("UPDATE workers SET epoch = epoch | 1 << 40", marks=pytest.mark.long),
        pytest.param("UPDATE workers SET worker_id = 'worker-3'", marks=pytest.mark.long),
        pytest.param("UPDATE commands SET accepted = 0", marks=pytest.mark.long),
        pytest.param("UPDATE commands SET ended = 'abc'", marks=pytest.mark.long),
        "UPDATE clock SET served_s = 'abc'",
        pytest.param("UPDATE commits SET number = 'abc'", marks=pytest.mark.long),
        "DROP TABLE workloads",
        pytest.param("DROP TABLE clock", marks=pytest.mark.long),
    ],
)
def test_a_store_that_cannot_be_read_is_one_line(tmp_path: Path, statement: str) -> None:
    path = tmp_path / FILES[0]

    async def scenario(store: Store) -> None:
        await store.write(
            clock_row(1),
            worker_row(3, Hello(worker_id="worker-1", name="alpha")),
            workload_row(workload(1, RUNNING)),
            command_row(StoredCommand(command(1, PENDING), "i1", accepted=True)),
        )

    with_store(path, scenario)
    execute(path, statement)
    options = ["--database", str(path), "--listen", "127.0.0.1:0"]
    done = run_coordinator(*options)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"leasehold coordinator: the database {path} can't be used: "), line
    if statement.startswith("UPDATE"):
        table = statement.split()[1]
        assert f"table {table}" in line
        assert "damaged" in line


@pytest.mark.parametrize(
    "change",
    ["record = x'ff01'", "name = 'other'", "create_time_ns = create_time_ns + 1", "served_s = 'abc'"],
)
def test_a_damaged_row_of_history_refuses_those_who_read_it(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILES[0]

    async def scenario(store: Store) -> None:
        await store.write(*(workload_row(workload(number, EXITED)) for number in (1, 2, 3)))
        await asyncio.to_thread(execute, path, f"UPDATE workloads SET {change} WHERE workload_id = 'w-2'")
        for _ in range(2):
            with pytest.raises(FleetError, match=r"row 'w-2' of table workloads .* is damaged") as error:
                await store.find_workload("w-2")
            assert error.value.reason == errors_pb2.ERROR_REASON_STORAGE_DAMAGED
        page = await some_workloads(store)
        assert [one.workload_id for one in page.items] == ["w-3", "w-1"]
        assert [one.workload_id for one in await store.find_workloads(["w-1", "w-2"])] == ["w-1"]
        await store.write(workload_row(workload(2, EXITED)))
        assert await store.find_workload("w-2") == workload(2, EXITED), "a new report replaces it"

    with_store(path, scenario)
    assert len(caplog.records) == 1, "the log names it once"


def test_a_damaged_request_is_not_done_twice(tmp_path: Path) -> None:
    path = tmp_path / FILES[0]

    async def scenario(store: Store) -> None:
        await store.write(command_row(StoredCommand(command(1, SUCCEEDED, "r1"))))
        await asyncio.to_thread(execute, path, "UPDATE commands SET workload_id = 'w-2'")
        with pytest.raises(FleetError, match="row 'c-1' of table commands"):
            await store.find_request(scoped("", "", "r1"))

    with_store(path, scenario)


def test_a_list_goes_on_behind_a_damaged_row(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        rows = [command_row(StoredCommand(command(number, SUCCEEDED))) for number in (1, 2, 3)]
        await bench.store.write(*rows)
        statement = "UPDATE commands SET workload_id = 'x' WHERE command_id = 'c-2'"
        await asyncio.to_thread(execute, tmp_path / FILES[0], statement)
        service = CommandService(bench.fleet.reader, bench.dispatcher)
        no_context: Any = None
        found, token = [], ""
        for _ in range(3):
            request = ListCommandsRequest(page_size=1, page_token=token)
            page = await service.ListCommands(request, no_context)
            found += [one.command_id for one in page.commands]
            token = page.next_page_token
        assert (found, token) == (["c-3", "c-1"], "")

    on_bench(tmp_path, scenario)


def test_a_disk_that_refuses_the_seal_holds_up_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(seal: CommitSeal, number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))
        with monkeypatch.context() as full:
            full.setattr(CommitSeal, "write", refuse)
            await store.write(workload_row(workload(2, RUNNING)))
            with pytest.raises(FleetError):
                await store.write(workload_row(workload(3, RUNNING)))
        await store.write(workload_row(workload(4, RUNNING)))

    with_store(tmp_path / FILES[0], scenario)
    assert names(tmp_path / FILES[0]) == ["n1", "n2", "n4"]
