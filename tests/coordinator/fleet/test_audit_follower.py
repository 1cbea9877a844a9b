"""The audit as a file: each entry once, over restarts, rotations and full disks."""

import asyncio
import errno
import json
import logging
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from leasehold_coordinator.fleet import audit_file, audit_follower
from leasehold_coordinator.fleet.audit_follower import AuditFollower
from leasehold_coordinator.storage.store import Store

from tests.coordinator.storage.test_audit_chain import row
from tests.coordinator.storage.test_store import with_store
from tests.coordinator.stories.test_lifecycle import until


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a poll or a retry."""
    monkeypatch.setattr(audit_follower, "POLL_S", 0.01)
    monkeypatch.setattr(audit_follower, "RETRY_S", 0.01)


def numbers(path: Path) -> list[int]:
    """Numbers of the entries in a file and in its older ones, oldest first, without a line that is cut."""
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda one: -int(one.suffix[1:]))
    lines = [
        line for one in (*older, path) if one.exists() for line in one.read_text().splitlines(keepends=True)
    ]
    return [int(json.loads(line)["number"]) for line in lines if line.endswith("\n")]


@asynccontextmanager
async def following(store: Store, path: Path) -> AsyncIterator[list[bool]]:
    """A follower at work, and what it told of the file's health."""
    told: list[bool] = []

    async def tell(is_serving: bool) -> None:
        told.append(is_serving)

    follower = AuditFollower(store, path, tell)
    task = asyncio.create_task(follower.follow())
    try:
        yield told
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        follower._thread.shutdown()  # the file is closed now


async def until_true(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


async def until_written(path: Path, number: int) -> None:
    def is_written() -> bool:
        with suppress(FileNotFoundError):  # a rotation renames the files meanwhile
            return number in numbers(path)
        return False

    await until_true(is_written)


def test_each_entry_is_written_once_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    async def scenario(store: Store) -> None:
        before = len(numbers(path)) if path.exists() else 0
        await store.write(row(), row())
        async with following(store, path) as told:
            await until_written(path, store.last_audit_number or 0)
            await store.write(row())
            await until_written(path, store.last_audit_number or 0)
        assert told[-1]
        await store.write(row())  # nobody follows
        if before:
            with path.open("a") as file:
                file.write('{"number": "77", "ha')  # cut by a crash

    for _ in range(3):
        with_store(tmp_path / "store.sqlite3", scenario)
    assert numbers(path) == list(range(1, 12))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_file_begins_where_somebody_renames_one(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "audit.jsonl", tmp_path / "elsewhere"

    async def scenario(store: Store) -> None:
        async with following(store, path) as told:
            await store.write(row(), row())
            await until_written(path, 2)
            path.rename(elsewhere)
            await store.write(row())
            await until_true(lambda: path.exists() and 3 in numbers(path))
        assert told[-1]

    with_store(tmp_path / "store.sqlite3", scenario)
    assert (numbers(elsewhere), numbers(path)) == ([1, 2], [3])


def test_files_rotate_by_size_and_a_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    monkeypatch.setattr(audit_file, "FILE_LIMIT_BYTES", 1_000)
    monkeypatch.setattr(audit_file, "FILE_COUNT", 3)

    async def scenario(store: Store) -> None:
        for _ in range(15):
            async with following(store, path):
                await store.write(row())
                await until_written(path, store.last_audit_number or 0)

    with_store(tmp_path / "store.sqlite3", scenario)
    kept = numbers(path)
    assert kept == list(range(kept[0], 16))
    assert kept[0] > 1
    assert {one.name for one in tmp_path.glob("audit.jsonl*")} == {
        "audit.jsonl",
        "audit.jsonl.1",
        "audit.jsonl.2",
    }
    assert all(one.stat().st_size <= 1_000 for one in tmp_path.glob("audit.jsonl*"))


def test_a_full_disk_is_told_and_loses_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, is_full = tmp_path / "audit.jsonl", False
    write_now = audit_file._write

    def write(descriptor: int, data: bytes, offset: int) -> None:
        if is_full:
            write_now(descriptor, data[:10], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        write_now(descriptor, data, offset)

    async def scenario(store: Store) -> None:
        nonlocal is_full
        async with following(store, path) as told:
            await store.write(row())
            await until_written(path, 1)
            monkeypatch.setattr(audit_file, "_write", write)
            is_full = True
            await store.write(row(), row())
            await until_true(lambda: False in told)
            await store.write(row())  # nothing waits for the file
            is_full = False
            await until_written(path, 4)
            await until_true(lambda: told[-1])
            assert told[0]

    with caplog.at_level(logging.WARNING):
        with_store(tmp_path / "store.sqlite3", scenario)
    assert numbers(path) == [1, 2, 3, 4]
    assert caplog.text.count("No space left on device") == 1, "each failure is told once"


def test_the_file_of_another_store_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    async def scenario(store: Store) -> None:
        await store.write(row(), row())
        async with following(store, path):
            await until_written(path, 2)

    with_store(tmp_path / "old.sqlite3", scenario)
    old = path.read_text()
    path_of_old = tmp_path / "audit.jsonl.1"

    async def fewer(store: Store) -> None:
        await store.write(row("user/b"))
        async with following(store, path):
            await until_true(lambda: numbers(path) == [1, 2, 1])

    with_store(tmp_path / "new.sqlite3", fewer)
    assert path_of_old.read_text() == old
    assert numbers(path) == [1, 2, 1]


@pytest.mark.parametrize("kind", ["symlink", "directory", "other content"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "audit.jsonl", tmp_path / "target"
    target.write_text("precious\n")
    match kind:
        case "symlink":
            path.symlink_to(target)
        case "directory":
            path.mkdir()
        case _:
            path.write_text("precious\n")

    async def scenario(store: Store) -> None:
        async with following(store, path) as told:
            await store.write(row())
            await until_true(lambda: bool(told))
            assert told == [False]

    with_store(tmp_path / "store.sqlite3", scenario)
    assert target.read_text() == "precious\n"
    if kind == "other content":
        assert path.read_text() == "precious\n"
