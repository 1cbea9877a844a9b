"""Which processes a workload has, on real ones: those of others, and the worker, are never among them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from leasehold.v1 import workload_pb2
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.host import process_readings
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.process_trees import scan_tree
from leasehold_worker.host.processes import ProcessIdentity, has_variable, identify, is_alive, send_signal
from leasehold_worker.operations.kill import Killer
from leasehold_worker.workloads import workload
from leasehold_worker.workloads.foreign_processes import owner
from leasehold_worker.workloads.workload import (
    CLAIM,
    EXEC,
    WORKLOAD_ID_VARIABLE,
    Workload,
)

from tests.simgpu.programs import wait_until

SLEEP = "import time; time.sleep(1000)"
NOBODY = 65534
NESTED = f"""
import subprocess, sys
code = [*sys.argv[2:], {SLEEP!r}]
child = subprocess.Popen([sys.executable, "-c", *code], start_new_session=sys.argv[1] == "session")
print(child.pid, flush=True)
child.wait()
"""
"""Starts a child and tells its pid; "session" puts the child into one of its own."""

ORPHANING = f"""
import os, subprocess, sys, time
told, tell = os.pipe()
if os.fork() == 0:
    os.write(tell, b"%d" % subprocess.Popen([sys.executable, "-c", {SLEEP!r}]).pid)
    os._exit(0)
os.wait()
print(int(os.read(told, 20)), flush=True)
time.sleep(1000)
"""
"""Leaves an orphan in its session, and tells its pid."""

WORKER = """
import os
from pathlib import Path
from datetime import UTC, datetime
import subprocess, trio
from leasehold.v1 import workload_pb2
from leasehold_worker.host.processes import identify
from leasehold_worker.workloads.workload import Workload
helpers = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True)]
workload = Workload("w-helpers", "one", workload_pb2.WorkloadSpec(), identify(os.getppid()), Path("/nowhere"),
                    datetime.now(UTC), None, uid=os.getuid(), mark="LEASEHOLD_WORKLOAD_ID=w-helpers")
found = [identity.pid for identity in workload.scanner(workload.mark)(0.0).processes]
found += [identity.pid for identity in trio.run(workload.find_processes)]
print(*found, flush=True)
for helper in helpers:
    helper.kill()
"""
"""A worker with helpers, that a workload's first process starts; says whom it takes for that workload."""


def make(workload_id: str, root: ProcessIdentity, mark: str = "", uid: int | None = None) -> Workload:
    return Workload(
        workload_id,
        workload_id,
        workload_pb2.WorkloadSpec(),
        root,
        Path("/nowhere"),
        datetime.now(UTC),
        None,
        origin=EXEC if mark else CLAIM,
        mark=mark,
        uid=os.getuid() if uid is None else uid,
    )


def pids(workload: Workload) -> set[int]:
    return {identity.pid for identity in workload.scanner(workload.mark)(0.0).processes}


def sure(pid: int) -> ProcessIdentity:
    identity = identify(pid)
    assert identity is not None
    return identity


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python programs in sessions of their own, and ends all that came of them with the test."""
    started: list[subprocess.Popen[str]] = []
    mark = str(tmp_path)

    def begin(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "STARTED_BY": mark, **environment},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()  # its environment, and so its mark, may not be there yet when its start is told
        process.wait(10)
    for identity in scan_tree(
        ProcessIdentity(Pid(2**22 + 1), 0), f"STARTED_BY={mark}", mark_uid=os.getuid()
    ).processes:
        send_signal(identity, signal.SIGKILL)
    for process in started:
        assert process.stdout is not None
        process.stdout.close()


def told(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(state_dir=tmp_path / "state")


async def test_a_workload_within_another_s_tree_is_left_out_and_outlives_it(
    config: WorkerConfig, tmp_path: Path, start: Start
) -> None:
    async with open_parts(config, tmp_path / "workloads", lambda _: None) as parts:
        outer = start(NESTED, "same", NESTED, "same")
        middle, inner = [*told(outer), *told(outer)]
        around, within = make("w-1", sure(outer.pid)), make("w-2", sure(middle))
        for workload in (around, within):
            parts.exit_monitor.add(workload)
        assert pids(around) == {outer.pid}
        assert pids(within) == {middle, inner}
        killer = Killer(parts.driver, parts.inventory, Rates())
        with trio.fail_after(10):
            await killer.kill(around, Progress.unheard())
            await around.ended.wait()
        assert pids(within) == {middle, inner}


async def test_whom_another_workload_left_orphaned_is_that_one_s(
    config: WorkerConfig, tmp_path: Path, start: Start
) -> None:
    mark = f"{WORKLOAD_ID_VARIABLE}=w-orphaning"
    async with open_parts(config, tmp_path / "workloads", lambda _: None) as parts:
        outer = start(NESTED, "session", ORPHANING, LEASEHOLD_WORKLOAD_ID="w-orphaning")
        middle, orphan = [*told(outer), *told(outer)]
        around, within = make("w-orphaning", sure(outer.pid), mark), make("w-2", sure(middle))
        for workload in (around, within):
            parts.exit_monitor.add(workload)
        assert pids(around) == {outer.pid}
        assert pids(within) == {middle, orphan}
        assert [identity.pid for identity in await around.find_processes()] == [outer.pid]


def test_marked_processes_are_found_wherever_they_went(start: Start) -> None:
    root = start(NESTED, "same")
    child = told(root)[0]
    elsewhere = start(NESTED, "session", LEASEHOLD_WORKLOAD_ID="w-elsewhere")
    grandchild = told(elsewhere)[0]
    mine = make("w-elsewhere", sure(root.pid), f"{WORKLOAD_ID_VARIABLE}=w-elsewhere")
    # What the worker itself started is never a workload's, marked or not: so look with another's eyes.
    found = scan_tree(mine.root, mine.mark, mark_uid=mine.uid).processes
    assert {identity.pid for identity in found} == {root.pid, child, elsewhere.pid, grandchild}
    assert pids(mine) == {root.pid, child}
    later = make("w-elsewhere", sure(grandchild), mine.mark)
    assert elsewhere.pid not in {
        identity.pid for identity in scan_tree(later.root, later.mark, mark_uid=later.uid).processes
    }


def test_a_mark_counts_in_processes_of_the_workload_s_user_only(start: Start) -> None:
    root = start(SLEEP)
    # An orphan: a descendant of the worker is in no workload.
    orphan = told(start(ORPHANING, LEASEHOLD_WORKLOAD_ID="w-users"))[0]
    # /proc shows no environment within execve(2).
    wait_until(lambda: has_variable(sure(orphan), WORKLOAD_ID_VARIABLE), "the orphan has its mark")
    for uid, counts in ((os.getuid(), True), (os.getuid() + 1, False)):
        mine = make("w-users", sure(root.pid), f"{WORKLOAD_ID_VARIABLE}=w-users", uid)
        found = {identity.pid for identity in scan_tree(mine.root, mine.mark, mark_uid=mine.uid).processes}
        assert (orphan in found) is counts
        assert (owner(orphan, [mine]) is mine) is counts
        assert (owner(orphan, [mine], "w-users") is mine) is counts


@pytest.fixture
def root_and_stranger(start: Start) -> Iterator[tuple[ProcessIdentity, ProcessIdentity]]:
    """A first process, and a younger orphan of another user with the mark of its workload."""
    root = sure(start(SLEEP).pid)
    begun = ["sh", "-c", "setsid sleep 1000 >&- & echo $!"]
    marked = {**os.environ, WORKLOAD_ID_VARIABLE: "w-strangers"}
    identity = sure(int(subprocess.check_output(begun, env=marked, user=NOBODY, cwd="/")))
    yield root, identity
    send_signal(identity, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is started by root only")
async def test_a_process_of_another_user_with_the_mark_is_not_killed(
    config: WorkerConfig, tmp_path: Path, root_and_stranger: tuple[ProcessIdentity, ProcessIdentity]
) -> None:
    async with open_parts(config, tmp_path / "workloads", lambda _: None) as parts:
        root, stranger = root_and_stranger
        mine = make("w-strangers", root, f"{WORKLOAD_ID_VARIABLE}=w-strangers")
        parts.exit_monitor.add(mine)
        with trio.fail_after(10):
            await Killer(parts.driver, parts.inventory, Rates()).kill(mine, Progress.unheard())
            await mine.ended.wait()
    assert is_alive(stranger)


def test_a_worker_and_its_helpers_are_in_no_workload_that_started_them(start: Start) -> None:
    outer = start(NESTED, "same", WORKER, LEASEHOLD_WORKLOAD_ID="w-helpers")
    told(outer)
    assert told(outer) == [outer.pid, outer.pid]


async def test_a_process_that_can_not_be_read_holds_nobody_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "MARKS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process_readings, "USER_READERS", 1)
    released = threading.Event()

    def hang(*_: object) -> bool:
        assert threading.current_thread() is not threading.main_thread(), "it would hold up all of the worker"
        return not released.wait(10)

    monkeypatch.setattr("leasehold_worker.host.process_trees.has_entries", hang)
    root = start(NESTED, "same")
    child = told(root)[0]
    mine = make("w-unread", sure(root.pid), f"{WORKLOAD_ID_VARIABLE}=w-unread")
    start(SLEEP)  # somebody of whom the environment has to be read
    try:
        with trio.fail_after(5):
            for _ in range(3):
                assert {identity.pid for identity in await mine.find_processes()} == {root.pid, child}
    finally:
        released.set()
