"""The journal on a real file, and a worker whose disk refuses."""

import resource
import shutil
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_type_hints
from unittest.mock import Mock

import pytest
import trio
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.gpu_pb2 import GPU_HEALTH_ECC_FAILED
from leasehold.v1.operation_pb2 import RunOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.worker.v1.session_pb2 import CommandSpec, CommandUpdate
from leasehold_worker.commands import journal_file
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.journal import Journal, open_journal
from leasehold_worker.commands.journal_records import WorkloadRecord
from leasehold_worker.commands.journal_seal import JournalSeal
from leasehold_worker.commands.ledger import Entry
from leasehold_worker.errors import OperationError, StartError
from leasehold_worker.leasing.leases import Cordon, Hold, Standing
from leasehold_worker.workloads.workload import Workload
from trio.testing import wait_all_tasks_blocked

from tests.worker.conftest import WorkerProcess
from tests.worker.counters import read_output
from tests.worker.disks import refusing
from tests.worker.scripted_coordinator import ScriptedCoordinator

KEY = ("workloads", "w1")


def workload(workload_id: str, record: bytes = b"{}") -> list[journal_file.Statement]:
    values = (workload_id, record)
    return [("INSERT OR REPLACE INTO workloads VALUES (?1, ?2, row_digest(?1, ?2))", values)]


def rows(path: Path) -> dict[str, bytes]:
    with sqlite3.connect(path) as connection:
        found = dict(connection.execute("SELECT workload_id, record FROM workloads"))
    connection.close()
    return found


def commits(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute("SELECT number FROM commits").fetchone()
    return int(number)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("leasehold_worker.commands.journal_file.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("leasehold_worker.commands.journal.RETRY_S", 0.01)
    return tmp_path / "journal.sqlite3"


async def refusal(journal: Journal) -> OperationError:
    """Why the journal can't be written, once it has found that out."""
    with trio.fail_after(10):
        while journal.refusal is None:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.001)
    return journal.refusal


async def test_nothing_is_called_before_it_is_on_disk(path: Path) -> None:
    seen: list[tuple[str, set[str]]] = []
    async with open_journal(path) as journal:
        for workload_id in ("w1", "w2"):
            journal.put(
                ("workloads", workload_id),
                workload(workload_id),
                lambda name=workload_id: seen.append((name, set(rows(path)))),  # type: ignore[misc]
            )
        journal.after_all(lambda: seen.append(("after", set(rows(path)))))
        assert not seen
        await journal.wait_settled()
    assert [name for name, _ in seen] == ["w1", "w2", "after"]
    assert all(found == {"w1", "w2"} for _, found in seen)


async def test_of_one_row_the_newest_is_written_and_all_are_told(path: Path) -> None:
    told: list[int] = []
    async with open_journal(path) as journal:
        for number in range(3):
            content = str(number).encode()
            journal.put(KEY, workload("w1", content), lambda n=number: told.append(n))  # type: ignore[misc]
        await journal.wait_settled()
        assert rows(path) == {"w1": b"2"}
    assert told == [0, 1, 2]


async def test_what_is_put_for_later_shares_the_next_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_worker.commands.journal.LATER_S", 60.0)
    async with open_journal(path) as journal:
        began = commits(path)
        for workload_id in ("w1", "w2"):
            journal.put(("workloads", workload_id), workload(workload_id), later=True)
        await wait_all_tasks_blocked(0.01)
        assert rows(path) == {}
        journal.put(KEY, workload("w1", b"new"), later=True)
        await journal.write(("workloads", "w3"), workload("w3"))
        assert rows(path) == {"w1": b"new", "w2": b"{}", "w3": b"{}"}
        assert commits(path) - began == 1
        journal.put(("workloads", "w4"), workload("w4"), later=True)
        await journal.wait_settled()
        assert "w4" in rows(path)
        journal.put(("workloads", "w5"), workload("w5"), later=True)
    assert "w5" in rows(path)


async def test_what_is_put_for_later_is_written_where_nothing_else_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_worker.commands.journal.LATER_S", 0.05)
    async with open_journal(path) as journal:
        for workload_id in ("w1", "w2"):
            written = trio.Event()
            journal.put(("workloads", workload_id), workload(workload_id), written.set, later=True)
            with trio.fail_after(10):
                await written.wait()
            assert workload_id in rows(path)


async def test_of_one_row_what_is_put_for_later_and_what_is_put_now_is_written_as_it_is_last(
    path: Path,
) -> None:
    told: list[str] = []
    async with open_journal(path) as journal:
        journal.put(KEY, workload("w1", b"1"), lambda: told.append("1"), later=True)
        journal.put(KEY, workload("w1", b"2"), lambda: told.append("2"))
        journal.put(KEY, workload("w1", b"3"), lambda: told.append("3"), later=True)
        await journal.wait_settled()
        assert rows(path) == {"w1": b"3"}
        with refusing(path):
            journal.put(KEY, workload("w1", b"4"), lambda: told.append("4"))
            await wait_all_tasks_blocked()  # it is being written
            journal.put(KEY, workload("w1", b"5"), lambda: told.append("5"), later=True)
            await refusal(journal)
        await journal.wait_settled()
        assert rows(path) == {"w1": b"5"}
    assert told == ["1", "2", "3", "4", "5"]


async def test_what_waits_at_the_end_is_written(path: Path) -> None:
    async with open_journal(path) as journal:
        journal.put(KEY, workload("w1"))
    assert set(rows(path)) == {"w1"}


async def test_a_disk_that_refuses_refuses_what_is_new_and_loses_nothing(path: Path) -> None:
    told: list[str] = []
    refused: list[OperationError] = []
    async with open_journal(path) as journal:
        with refusing(path):
            journal.put(KEY, workload("w1"), lambda: told.append("w1"))
            journal.put(("commands", "c1"), workload("c1"), lambda: told.append("c1"), refused=refused.append)
            assert (await refusal(journal)).reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
            with pytest.raises(OperationError, match="locked"):
                await journal.write(("intents", "c2"), workload("c2"))
            assert not told
        with trio.fail_after(10):
            await journal.wait_settled()
        assert journal.refusal is None
    assert told == ["w1"]
    assert len(refused) == 1
    assert set(rows(path)) == {"w1"}


async def test_a_shortage_of_threads_refuses_what_is_new_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async with open_journal(path) as journal:
        with monkeypatch.context() as shortage:
            shortage.setattr("trio._core._thread_cache.ThreadCache.start_thread_soon", no_thread)
            journal.put(KEY, workload("w1"))
            assert "no thread can be started" in (await refusal(journal)).message
            with pytest.raises(OperationError, match="no thread can be started"):
                await journal.write(("intents", "c1"), workload("c1"))
        with trio.fail_after(10):
            await journal.wait_settled()
        assert journal.refusal is None
    assert set(rows(path)) == {"w1"}


async def test_a_newer_state_replaces_the_one_that_could_not_be_written(path: Path) -> None:
    told: list[str] = []
    async with open_journal(path) as journal:
        with refusing(path):
            journal.put(KEY, workload("w1", b"old"), lambda: told.append("old"))
            await refusal(journal)
            journal.put(KEY, workload("w1", b"new"), lambda: told.append("new"))
        with trio.fail_after(10):
            await journal.wait_settled()
        assert rows(path) == {"w1": b"new"}
    assert told == ["old", "new"]


async def test_what_replaces_a_refused_write_stands_in_its_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_worker.commands.journal_file.BUSY_TIMEOUT_S", 0.1)
    told: list[str] = []
    refused: list[OperationError] = []
    async with open_journal(path) as journal:
        with refusing(path):
            journal.put(KEY, workload("w1", b"old"), lambda: told.append("old"), refused=refused.append)
            await wait_all_tasks_blocked()  # it is being written
            journal.put(KEY, workload("w1", b"new"), lambda: told.append("new"))
            await refusal(journal)
        with trio.fail_after(10):
            await journal.wait_settled()
        assert rows(path) == {"w1": b"new"}
    assert told == ["old", "new"]
    assert not refused


async def test_what_waits_for_all_is_called_where_the_last_write_was_refused(path: Path) -> None:
    told: list[str] = []
    refused: list[OperationError] = []
    async with open_journal(path) as journal:
        with refusing(path):
            journal.put(KEY, workload("w1"), lambda: told.append("w1"))
            journal.put(("workloads", "w2"), workload("w2"), refused=refused.append)
            journal.after_all(lambda: told.append("after"))
            await refusal(journal)
            assert not told
        with trio.fail_after(10):
            await journal.wait_settled()
    assert told == ["w1", "after"]
    assert len(refused) == 1


async def test_a_disk_that_does_not_answer_refuses_in_time_and_what_it_writes_late_is_harmless(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_worker.commands.journal_file.BUSY_TIMEOUT_S", 60.0)
    monkeypatch.setattr("leasehold_worker.commands.journal.WRITE_TIMEOUT_S", 0.05)
    intent = Intent("lock", ())
    ended = Entry(
        CommandSpec(command_id="c1"), 1, 0.0, CommandUpdate(state=command_pb2.COMMAND_STATE_REJECTED)
    )
    told: list[str] = []
    async with open_journal(path) as journal:
        with refusing(path):
            with trio.fail_after(10), pytest.raises(OperationError, match="no answer within"):
                await journal.write(("intents", "c1"), journal_file.keep_intent("c1", intent))
            assert (await refusal(journal)).reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
            journal.put(("commands", "c1"), journal_file.keep_command(ended), lambda: told.append("c1"))
            assert not told
        with trio.fail_after(10):
            await journal.wait_settled()
        assert journal.refusal is None
    assert told == ["c1"]
    file = journal_file.JournalFile(path)
    file.close()
    assert [entry.command_id for entry in file.contents.entries] == ["c1"]
    assert not file.contents.intents


@pytest.mark.parametrize(
    "break_it",
    [
        lambda path: path.write_bytes(b"this is no database, and never was one" * 100),
        lambda path: path.write_bytes(path.read_bytes()[:5000] + b"\xff" * 3000 + path.read_bytes()[8000:]),
        lambda path: _set_record(path, b"{"),
        lambda path: _set_record(path, b"{}", "digest"),
        lambda path: path.with_name(f"{path.name}-seal").unlink(),
    ],
    ids=["foreign", "damaged", "unreadable record", "another record", "no seal"],
)
def test_a_journal_that_cannot_be_used_is_left_as_it_is(
    path: Path, break_it: Callable[[Path], object]
) -> None:
    file = journal_file.JournalFile(path)
    for number in range(50):
        file.commit(workload(str(number), b"x" * 500))
    file.close()
    break_it(path)
    before = path.read_bytes()
    with pytest.raises(StartError, match="can't be used"):
        journal_file.JournalFile(path)
    assert path.read_bytes() == before


def _set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def _set_record(path: Path, record: bytes, digest: str = "row_digest(workload_id, ?1)") -> None:
    with journal_file.connect(path) as connection:
        connection.execute(f"UPDATE workloads SET record = ?1, digest = {digest}", (record,))
    connection.close()


def killed(path: Path) -> Path:
    """The files of a journal as a killed worker leaves them, with three commits in the log."""
    file = journal_file.JournalFile(path)
    for number in range(3):
        file.commit(standing(number))
    left = path.with_name("left")
    left.mkdir()
    for name in (path.name, f"{path.name}-wal", f"{path.name}-seal"):
        shutil.copy(path.with_name(name), left)
    file.close()
    return left / path.name


def standing(number: int) -> list[journal_file.Statement]:
    return journal_file.keep_standing(f"GPU-{number}", Standing(health_reason="noisy" * 100))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_journal_whose_log_lost_commits_is_left_as_it_is(path: Path) -> None:
    left = killed(path)
    log = left.with_name(f"{left.name}-wal")
    flip(log, log.stat().st_size // 2)
    before = log.read_bytes()
    with pytest.raises(StartError, match=r"its last commit is number ., and journal\.sqlite3-seal says 3"):
        journal_file.JournalFile(left)
    assert log.read_bytes() == before
    flip(log, log.stat().st_size // 2)
    file = journal_file.JournalFile(left)
    assert file.contents.standings.keys() == {"GPU-0", "GPU-1", "GPU-2"}
    file.close()


def test_a_file_is_closed_after_its_last_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the worker abandons a commit that hangs. SQLite crashed the process then."""
    monkeypatch.setattr(journal_file, "BUSY_TIMEOUT_S", 60)
    file = journal_file.JournalFile(path)
    with ThreadPoolExecutor() as threads, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        commit = threads.submit(file.commit, standing(1))
        assert not wait([commit], timeout=0.2).done
        close = threads.submit(file.close)
        assert not wait([commit, close], timeout=0.2).done
        other.execute("ROLLBACK")
        commit.result(10)
        close.result(10)
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            file.commit(standing(2))
    again = journal_file.JournalFile(path)
    assert again.contents.standings.keys() == {"GPU-1"}
    again.close()


def test_a_bit_that_flips_in_a_record_is_noticed(path: Path) -> None:
    file = journal_file.JournalFile(path)
    file.commit(standing(1))
    file.close()
    flip(path, path.read_bytes().index(b"noisy"))
    with pytest.raises(StartError, match="1 rows of standings are damaged"):
        journal_file.JournalFile(path)


def test_a_journal_from_an_old_backup_is_noticed(path: Path) -> None:
    journal_file.JournalFile(path).close()
    old = path.read_bytes()
    file = journal_file.JournalFile(path)
    file.commit(standing(1))
    file.close()
    path.write_bytes(old)
    with pytest.raises(StartError, match=r"number 0, and journal\.sqlite3-seal says 1"):
        journal_file.JournalFile(path)
    path.unlink()
    with pytest.raises(StartError, match="it is missing, and had 1 commits"):
        journal_file.JournalFile(path)
    assert not path.exists()


def test_a_crash_between_a_commit_and_its_seal_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = journal_file.JournalFile(path)
    with monkeypatch.context() as crash:
        crash.setattr(JournalSeal, "write", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            file.commit(standing(1))
    file.close()
    again = journal_file.JournalFile(path)
    assert again.contents.standings.keys() == {"GPU-1"}
    again.commit(standing(2))
    again.close()
    last = journal_file.JournalFile(path)
    assert last.contents.standings.keys() == {"GPU-1", "GPU-2"}
    last.close()


def test_a_seal_that_a_power_loss_left_behind_does_no_harm_and_waits_for_the_disk_once_a_second(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    now_s = [100.0]
    monkeypatch.setattr("leasehold_worker.commands.journal_seal.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("leasehold_worker.commands.journal_seal.os.fdatasync", synced.append)
    file = journal_file.JournalFile(path)
    seal = path.with_name(f"{path.name}-seal")
    file.commit(standing(0))
    early = seal.read_bytes()
    for number in range(1, 4):
        file.commit(standing(number))
    assert not synced
    now_s[0] += 1.0
    file.commit(standing(4))
    file.commit(standing(5))
    assert len(synced) == 1
    file.close()
    assert len(synced) == 2
    seal.write_bytes(early)
    again = journal_file.JournalFile(path)
    assert len(again.contents.standings) == 6
    again.commit(standing(6))
    assert seal.read_bytes() > early
    again.close()


def test_a_seal_that_can_not_be_written_holds_up_the_next_commit_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    file = journal_file.JournalFile(path)
    with monkeypatch.context() as disk:
        disk.setattr(JournalSeal, "write", refuse)
        file.commit(standing(1))
        with pytest.raises(sqlite3.OperationalError, match="seal: Input/output error"):
            file.commit(standing(2))
    file.commit(standing(3))
    file.close()
    again = journal_file.JournalFile(path)
    assert again.contents.standings.keys() == {"GPU-1", "GPU-3"}
    again.close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-seal"])
async def test_a_journal_that_is_deleted_under_a_worker_takes_nothing_more(path: Path, suffix: str) -> None:
    async with open_journal(path) as journal:
        await journal.write(KEY, workload("w1"))
        gone = path.with_name(f"{path.name}{suffix}")
        gone.rename(path.with_name("elsewhere"))
        with pytest.raises(
            OperationError, match=r"deleted or replaced\): move the same files back, "
        ) as refused:
            await journal.write(KEY, workload("w2"))
        assert "check the disk" not in refused.value.message
        assert refused.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
        path.with_name("elsewhere").rename(gone)  # which is what a user can do
        await journal.write(KEY, workload("w3"))
    assert rows(path).keys() == {"w1", "w3"}


@pytest.mark.long
def test_a_worker_whose_disk_is_full_takes_in_nothing_and_goes_on_afterwards(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator
) -> None:
    coordinator.load_interval_s = 0.1
    worker = start_worker(None)
    session = coordinator.next_session()
    ticking = WorkloadSpec(
        arguments=["sh", "-c", "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"]
    )
    run = RunOperation(name="one", spec=ticking)
    assert session.run("c1", "w1", run=run).state == command_pb2.COMMAND_STATE_SUCCEEDED
    limits = resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    refused = session.run("c2", "w2", run=run)
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED
    assert refused.error.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
    assert "journal can't be written" in refused.error.message
    told = session.wait(
        lambda frame: any(c.name == "commands" and not c.available for c in frame.hello.capabilities)
    )
    assert [found.workload_id for found in told.hello.workloads] == ["w1"]
    again = session.run("c3", "w3", run=run)
    assert again.error.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, limits)
    session.wait(lambda frame: any(c.name == "commands" and c.available for c in frame.hello.capabilities))
    assert session.run("c4", "w4", run=run).state == command_pb2.COMMAND_STATE_SUCCEEDED
    assert read_output(session, "w1") == "up\n"
    assert not any(found.workload_id in ("w2", "w3") for found in told.hello.workloads)


def test_a_corrupt_journal_is_one_line_and_the_workloads_go_on(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    journal = tmp_path / "state/journal.sqlite3"
    journal.parent.mkdir()
    journal.write_bytes(b"not a journal" * 1000)
    worker = start_worker(None)
    assert worker.process.wait(timeout=30) == 2
    (line,) = worker.log.read_text().splitlines()
    assert "journal.sqlite3 can't be used" in line
    assert journal.read_bytes() == b"not a journal" * 1000


def test_an_old_journal_does_not_come_back_after_a_newer_one(path: Path, tmp_path: Path) -> None:
    file = journal_file.JournalFile(path)
    file.commit(standing(1))
    file.close()
    old = tmp_path / "old"
    _move(path, old)
    journal_file.JournalFile(path).close()
    _move(path, tmp_path / "newer")
    _move(old / path.name, path.parent)
    before = path.read_bytes()
    with pytest.raises(
        StartError, match="is number 1, and number 2 was made after it, so its leases are old: move"
    ):
        journal_file.JournalFile(path)
    assert path.read_bytes() == before
    _move(path, old)
    _move(tmp_path / "newer" / path.name, path.parent)
    journal_file.JournalFile(path).close()  # the newer one is the last one still


@pytest.mark.parametrize("damage", ["none", "no number", "no new journal"])
def test_a_journal_that_was_moved_away_comes_back_if_no_newer_one_was_made(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    journal_file.JournalFile(path).close()
    number = path.with_name("last_journal")
    if damage == "no number":
        number.unlink()
        journal_file.JournalFile(path).close()
        assert number.read_text() == "1\n", "it is known again"
    _move(path, tmp_path / "away")
    if damage == "no new journal":
        with monkeypatch.context() as patched:
            refuse = Mock(side_effect=sqlite3.OperationalError("full"))
            patched.setattr(journal_file, "bring_up_to_date", refuse)
            with pytest.raises(StartError, match="full"):
                journal_file.JournalFile(path)
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
    _move(tmp_path / "away" / path.name, path.parent)
    journal_file.JournalFile(path).close()


def test_a_number_that_no_journal_can_have_is_damage(path: Path) -> None:
    path.with_name("last_journal").write_text(f"{2**31 - 1}\n")
    with pytest.raises(StartError, match="last_journal is damaged, it holds no number of a journal"):
        journal_file.JournalFile(path)
    assert not path.exists()


def _move(path: Path, folder: Path) -> None:
    """Moves all files of a journal."""
    folder.mkdir(exist_ok=True)
    for file in path.parent.glob(f"{path.name}*"):
        file.rename(folder / file.name)


def test_a_journal_of_format_1_is_taken_over(path: Path) -> None:
    standing = Standing(Cordon("noisy", "ann", datetime.now(UTC)), GPU_HEALTH_ECC_FAILED, "one error")
    file = journal_file.JournalFile(path)
    file.close()
    with sqlite3.connect(path) as connection:
        without = "".join(
            f"ALTER TABLE {table} DROP COLUMN digest;" for table in ("commands", "intents", "workloads")
        )
        connection.executescript(
            f"DROP TABLE standings; DROP TABLE holds; DROP TABLE commits; {without} PRAGMA user_version = 1"
        )
    connection.close()
    path.with_name(f"{path.name}-seal").unlink()
    file = journal_file.JournalFile(path)
    assert file.contents.standings == {}
    file.commit(journal_file.keep_standing("GPU-1", standing))
    file.close()
    file = journal_file.JournalFile(path)
    file.close()
    assert file.contents.standings == {"GPU-1": standing}


def test_a_journal_of_format_3_is_taken_over(path: Path) -> None:
    """It counts its commits, and has no holds."""
    standing = Standing(Cordon("noisy", "ann", datetime.now(UTC)))
    file = journal_file.JournalFile(path)
    file.commit(journal_file.keep_standing("GPU-1", standing))
    file.close()
    with sqlite3.connect(path) as connection:
        connection.executescript("DROP TABLE holds; PRAGMA user_version = 3")
    connection.close()
    file = journal_file.JournalFile(path)
    assert file.contents.standings == {"GPU-1": standing}
    assert file.contents.holds == []
    copy = path.with_name(f"{path.name}-format-3")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with closing(sqlite3.connect(copy)) as older:
        assert older.execute("PRAGMA user_version").fetchone() == (3,)
        assert older.execute("SELECT count(*) FROM standings").fetchone() == (1,)
    now = datetime.now(UTC)
    end = now + timedelta(seconds=60)
    holds = [Hold(name, ("w1", "w2"), ("GPU-1",), now, end, "ann") for name in ("c1", "c2")]
    for hold in holds:
        file.commit(journal_file.keep_hold(hold.hold_id, hold))
    file.commit(journal_file.keep_hold("c1", None))
    file.close()
    file = journal_file.JournalFile(path)
    file.close()
    assert file.contents.holds == holds[1:]


def test_a_journal_of_an_older_format_is_left_as_it_is_if_it_can_not_be_copied(path: Path) -> None:
    journal_file.JournalFile(path).close()
    with sqlite3.connect(path) as connection:
        connection.executescript("DROP TABLE holds; PRAGMA user_version = 3")
    connection.close()
    path.with_name(f"{path.name}-format-3.partial").mkdir()
    before = path.read_bytes()
    with pytest.raises(StartError, match="can't be used"):
        journal_file.JournalFile(path)
    assert path.read_bytes() == before


def test_a_journal_of_a_newer_release_is_refused_and_left_as_it_is(path: Path) -> None:
    journal_file.JournalFile(path).close()
    _set_version(path, 99)
    before = path.read_bytes()
    with pytest.raises(StartError, match=r"a newer release wrote the journal .*format 99.*reads 4"):
        journal_file.JournalFile(path)
    assert path.read_bytes() == before


def test_a_record_has_the_fields_of_its_workload_with_the_same_types() -> None:
    of_record, of_workload = get_type_hints(WorkloadRecord), get_type_hints(Workload)
    of_record.pop("boot_id")
    assert of_record.pop("error") == errors_pb2.Error | None
    assert {name: of_workload[name] for name in of_record} == of_record
