"""What /proc says of processes, whose names, arguments and control groups their users choose."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold_worker.host import cgroups, processes
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.process_trees import scan_tree
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.workloads.foreign_processes import owner

from .conftest import Examples

SEEDS = st.integers(0, 2**32)
PID = 4242
STAT = b"4242 (%s) S 1 4242 4242 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0\n"
STATUS = (
    b"Name:\t%s\nState:\tS (sleeping)\nTgid:\t4242\nTracerPid:\t0\nUid:\t5\t5\t5\t5\n"
    b"SigCgt:\t0000000000004002\n"
)
CGROUP = b"5:freezer:/%s\n0::/%s\n"
NAMES = (
    b"program",
    b") R 1 1 (",
    b"\xff\xfe",
    "\u2028\x85\x1c".encode(),
    b"\x0bUid:\t0\t0",
    b"\x1b[2J",
    b"..",
    b"../../..",
    b"a:b:c",
    b"",
)
"""What a user may call a program or a control group. The kernel itself writes line ends as an escape."""


def damaged(choose: random.Random, text: bytes) -> bytes:
    """The text, mostly whole: cut short, or with another byte."""
    data = bytearray(text)
    match choose.randrange(5):
        case 0:
            del data[choose.randrange(len(data) + 1) :]
        case 1:
            data[choose.randrange(len(data))] = choose.randrange(1, 256)
    return bytes(data)


def test_any_text_is_read_without_an_error(examples: Examples) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = put_in_place(Path(name), patch)

        @examples
        @given(SEEDS)
        def play(seed: int) -> None:
            choose = random.Random(seed)
            for file, text in (("stat", STAT), ("status", STATUS), ("cgroup", CGROUP)):
                filled = text.replace(b"%s", choose.choice(NAMES))
                (folder / file).write_bytes(damaged(choose, filled))
            (folder / "cmdline").write_bytes(choose.choice(NAMES) + b"\0" + choose.choice(NAMES))
            (folder / "environ").write_bytes(b"LEASEHOLD_WORKLOAD_ID=" + choose.choice(NAMES))
            read_all()

        play()


@pytest.mark.parametrize("program", NAMES)
def test_a_name_says_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: bytes
) -> None:
    folder = put_in_place(tmp_path, monkeypatch)
    (folder / "stat").write_bytes(STAT.replace(b"%s", program))
    (folder / "status").write_bytes(STATUS.replace(b"%s", program))
    (folder / "cgroup").write_bytes(CGROUP.replace(b"%s", program))
    assert processes.identify(PID) == ProcessIdentity(Pid(PID), 777)
    assert processes.has_real_user(PID, 5)
    assert not cgroups.is_frozen(PID)


def put_in_place(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Has the worker read a folder instead of /proc. Returns that of the process."""
    proc = folder / "proc"
    (proc / str(PID)).mkdir(parents=True)
    (folder / "cgroup").mkdir()
    for module in ("process_files", "process_trees", "processes"):
        patch.setattr(f"leasehold_worker.host.{module}.PROC", proc)
    patch.setattr(cgroups, "_PROC", proc)
    patch.setattr(cgroups, "_CGROUP", folder / "cgroup")
    return proc / str(PID)


def read_all() -> None:
    """Asks for everything that the worker wants to know of a process."""
    itself = ProcessIdentity(Pid(PID), 777)
    processes.identify(PID)
    processes.is_zombie(PID)
    scan_tree(itself, "LEASEHOLD_WORKLOAD_ID=w", mark_uid=5)
    processes.why_blocked(itself)
    processes.tracer(itself)
    processes.catches(itself, 15)
    processes.has_variable(itself, "LEASEHOLD_WORKLOAD_ID")
    processes.user_id(PID)
    processes.has_real_user(PID, 5)
    list(processes.lineage(PID))
    assert all(isinstance(part, str) for part in processes.command_line(PID))
    cgroups.memory_limits(cgroups.memory_groups(PID))
    cgroups.cpu_limit_millicores(PID)
    cgroups.version_2_group(PID)
    cgroups.is_frozen(PID)
    owner(PID, [])
