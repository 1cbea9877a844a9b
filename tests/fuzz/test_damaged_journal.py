"""The journal of a worker, on a disk that changes what was written."""

import json
import random
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from leasehold.v1 import workload_pb2
from leasehold.v1.operation_pb2 import RunOperation
from leasehold.worker.v1.session_pb2 import CommandSpec, CommandUpdate
from leasehold_worker.commands import journal_file
from leasehold_worker.commands.intents import Intent, WorkloadIntent
from leasehold_worker.commands.journal_file import JournalFile, connect
from leasehold_worker.commands.journal_records import workload_record
from leasehold_worker.commands.ledger import Entry
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import RUNNING, Member
from leasehold_worker.errors import StartError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.leases import Cordon, Lease, LeaseId, Standing
from leasehold_worker.workloads.workload import Workload

from .conftest import Examples
from .messages import TEXTS, fill
from .test_hostile_peers import SEEDS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = ProcessIdentity(Pid(4711), 815)
LEASE = Lease(LeaseId("l-1"), "w-1", ("GPU-1", "GPU-2"), NOW, 7)
MEMBER = Member(ROOT, RUNNING, {"GPU-1": 1 << 30}, (GpuPair("GPU-1", "GPU-2"),))
SUFFIXES = ("", "-wal", "-seal")
ODD: tuple[Any, ...] = (None, True, -1, 2**70, 0.5, [], {}, [[[]]], *TEXTS)


def fill_journal(file: JournalFile) -> None:
    """Some of everything, in a few commits."""
    target = WorkloadIntent("w-1", (MEMBER,), ("GPU-1",), ("GPU-2",), parked=False)
    spec = fill(workload_pb2.WorkloadSpec, random.Random(1))
    workload = Workload("w-1", "one", spec, ROOT, Path("output.log"), NOW, LEASE, members=(MEMBER,))
    command = CommandSpec(command_id="c-1", workload_id="w-1")
    command.operation.run.CopyFrom(RunOperation(name="one"))
    file.commit(journal_file.keep_workload(workload_record(workload, "boot")))
    file.commit(journal_file.keep_command(Entry(command, 1, 0.0, CommandUpdate(command_id="c-1"))))
    file.commit(journal_file.keep_intent("c-1", Intent("lock", (target,), reserved=(LEASE,))))
    file.commit(journal_file.keep_standing("GPU-1", Standing(Cordon("noisy", "ann", NOW))))


def opened(path: Path) -> journal_file.Contents | None:
    """What a journal holds. None: the worker refuses to start with it."""
    try:
        file = JournalFile(path)
    except StartError:
        return None
    file.close()
    return file.contents


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The journal that a killed worker has left."""
    path = tmp_path / "journal.sqlite3"
    file = JournalFile(path)
    fill_journal(file)
    (tmp_path / "left").mkdir()
    for suffix in SUFFIXES:
        shutil.copy(f"{path}{suffix}", tmp_path / "left")
    file.close()
    return tmp_path / "left" / path.name


def test_damage_is_noticed_or_changes_nothing(left: Path, examples: Examples) -> None:
    with tempfile.TemporaryDirectory(dir=left.parent) as name:
        whole = opened(Path(shutil.copytree(left.parent, Path(name, "whole"), ignore=_copies), left.name))
    assert whole is not None

    @examples
    @given(SEEDS)
    def play(seed: int) -> None:
        choose = random.Random(seed)
        with tempfile.TemporaryDirectory(dir=left.parent) as name:
            folder = Path(shutil.copytree(left.parent, Path(name, "damaged"), ignore=_copies))
            damage(folder / f"{left.name}{choose.choice(SUFFIXES)}", choose)
            assert opened(folder / left.name) in (None, whole)

    play()


def _copies(_: object, names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("journal")]


def damage(path: Path, choose: random.Random) -> None:
    """Flips a bit, zeroes a block, cuts the end off or takes the file away."""
    data = bytearray(path.read_bytes())
    at = choose.randrange(len(data)) if data else 0
    match choose.choice(["flip", "flip", "flip", "zero", "cut", "delete"]):
        case "flip" if data:
            data[at] ^= 1 << choose.randrange(8)
        case "zero":
            start = at // 512 * 512
            data[start : start + 512] = bytes(len(data[start : start + 512]))
        case "cut":
            del data[at:]
        case "delete":
            path.unlink()
            return
    path.write_bytes(data)


def test_records_of_any_content_are_read_or_refused(left: Path, examples: Examples) -> None:
    @examples
    @given(SEEDS)
    def play(seed: int) -> None:
        choose = random.Random(seed)
        table, column = choose.choice(
            [("workloads", "record"), ("intents", "intent"), ("standings", "standing")]
        )
        with tempfile.TemporaryDirectory(dir=left.parent) as name:
            folder = Path(shutil.copytree(left.parent, Path(name, "odd"), ignore=_copies))
            connection = connect(folder / left.name)
            (text,) = connection.execute(f"SELECT {column} FROM {table}").fetchone()
            record = json.loads(text)
            for _ in range(choose.randrange(1, 4)):
                change(record, choose)
            key = {"workloads": "workload_id", "intents": "command_id", "standings": "gpu_uuid"}[table]
            with connection:
                connection.execute(
                    f"UPDATE {table} SET {column} = ?1, digest = row_digest({key}, ?1)",
                    (json.dumps(record).encode(),),
                )
            connection.close()
            opened(folder / left.name)

    play()


def change(record: Any, choose: random.Random) -> None:
    """Changes one value somewhere in a record."""
    while True:
        keys = list(record) if isinstance(record, dict) else list(range(len(record)))
        if not keys:
            return
        key = choose.choice(keys)
        if not isinstance(record[key], dict | list) or choose.random() < 0.3:
            break
        record = record[key]
    if choose.random() < 0.2:
        del record[key]
    else:
        record[key] = choose.choice(ODD)
