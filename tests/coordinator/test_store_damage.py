"""A store that lost something is noticed, and never served as if it was whole."""

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold_coordinator.commit_seal import CommitSeal
from leasehold_coordinator.errors import FleetError, StartError
from leasehold_coordinator.store import Store, workload_row

from .conftest import COMMAND
from .test_store import RUNNING, with_store, workload

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


def test_a_store_that_is_gone_is_not_begun_anew(tmp_path: Path) -> None:
    path = copy_of_killed(tmp_path)
    for name in FILES[:2]:
        (path.parent / name).unlink()
    with pytest.raises(StartError, match="has lost commits: it ends at number 0"):
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
        "UPDATE workloads SET record = 'text'",
        "DROP TABLE workloads",
        "DROP TABLE clock",
    ],
)
def test_a_store_that_cannot_be_read_is_one_line(tmp_path: Path, statement: str) -> None:
    path = tmp_path / FILES[0]

    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))

    with_store(path, scenario)
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()
    options = ["--database", str(path), "--listen", "127.0.0.1:0"]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"leasehold coordinator: the database {path} can't be used: "), line


def test_a_damaged_record_refuses_those_who_read_it(tmp_path: Path) -> None:
    path = tmp_path / FILES[0]

    async def scenario(store: Store) -> None:
        await store.write(workload_row(workload(1, RUNNING)))
        await asyncio.to_thread(spoil)
        with pytest.raises(FleetError) as error:
            await store.find_workload("w-1")
        assert error.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE

    def spoil() -> None:
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("UPDATE workloads SET record = x'ff01'")
        connection.close()

    with_store(path, scenario)


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
