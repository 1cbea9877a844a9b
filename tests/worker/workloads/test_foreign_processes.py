"""Who else is on the GPUs: real processes on a simulated host."""

import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio
from leasehold.v1 import workload_pb2
from leasehold_simgpu import SimulatedHost
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.gpus import inventory
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity, identify, may_be_parent
from leasehold_worker.leasing.leases import FOREIGN, FREE
from leasehold_worker.workloads import foreign_processes
from leasehold_worker.workloads.foreign_processes import owner
from leasehold_worker.workloads.workload import CLAIM, WORKLOAD_ID_VARIABLE, Workload

from tests.grids import grid
from tests.prefork import run
from tests.worker.conftest import COUNTER

SLEEP = "import time; print(flush=True); time.sleep(1000)"


def workload_of(identity: ProcessIdentity, workload_id: str = "w-1") -> Workload:
    return Workload(
        workload_id,
        workload_id,
        workload_pb2.WorkloadSpec(),
        identity,
        Path("/nowhere"),
        datetime.now(UTC),
        None,
        origin=CLAIM,
        uid=os.getuid(),
    )


def test_a_process_belongs_to_a_workload_by_descent_by_session_or_by_its_mark() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    # The parent ends once the test knows who it was.
    orphaned = f"""
import os, sys
if not os.fork():
    os.execv(sys.executable, ["python", "-c", {SLEEP!r}])
sys.stdin.read()
"""
    marked = {WORKLOAD_ID_VARIABLE: "w-1"}
    cases = [(nested, {}, True), (orphaned, {}, True), (SLEEP, marked, False), (SLEEP, {}, False)]
    for code, environment, descends in cases:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            root = identify(process.pid)
            process.stdin.close()
            process.stdout.readline()
            if code == orphaned:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            (pid, *_) = _group(process.pid)
            mine = workload_of(root if descends and root else ProcessIdentity(Pid(1), 0))
            found = owner(pid, [workload_of(ProcessIdentity(Pid(1), 1), "w-0"), mine])
            assert found is (mine if descends or environment else None), code
        finally:
            os.killpg(process.pid, 9)
            process.wait()
            process.stdout.close()


def test_a_session_with_the_number_of_a_first_process_may_be_that_of_another() -> None:
    """The kernel uses the number again once the processes of a session have ended."""
    script = "sleep 1000 >&- & echo $!; cat"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        orphan = int(leader.stdout.readline())
        try:
            root = identify(leader.pid)
            assert root is not None
            mine = workload_of(root)
            former = workload_of(ProcessIdentity(root.pid, root.start_time_ticks - 1))
            assert owner(orphan, [mine]) is mine
            assert owner(orphan, [former]) is None, "its pid and its session are those of another now"
            leader.stdin.close()
            leader.wait(timeout=30)
            assert owner(orphan, [mine]) is mine
            mine.uid = os.getuid() + 1
            assert owner(orphan, [mine]) is None
        finally:
            os.kill(orphan, 9)


LAUNCHER = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
told, tell = os.pipe()
program = os.fork()
if program == 0:
    os.setsid()
    if os.fork() == 0:
        orphan = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True, env={})
        os.write(tell, b"%d" % orphan.pid)
        os._exit(0)
    os.wait()
    os.write(tell, b" ")
    time.sleep(1000)
text = b""
while not text.endswith(b" "):
    text += os.read(told, 20)
print(program, text.decode(), flush=True)
os.wait()
"""
"""Starts a program that leaves an orphan without its mark in a session of its own. Tells the pids of both."""


def test_a_process_belongs_to_the_workload_of_which_it_is_an_orphan() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        program, orphan = map(int, process.stdout.readline().split())
        try:
            launcher, root = identify(process.pid), identify(program)
            assert launcher is not None
            assert root is not None
            mine = workload_of(root)
            assert owner(orphan, [mine]) is None
            mine.launcher = launcher
            assert owner(orphan, [mine]) is mine
            assert may_be_parent(launcher, root)
            assert not may_be_parent(root, launcher)
        finally:
            for pid in (orphan, program, process.pid):
                os.kill(pid, 9)


def _group(session_id: int) -> list[int]:
    """The processes of a session, the last started first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session_id and fields[0] not in "ZX":
                found.append((int(fields[19]), int(entry.name)))
    return [pid for _, pid in sorted(found, reverse=True)]


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(state_dir=tmp_path / "state")


async def test_looks_at_the_same_time_are_one(
    config: WorkerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_parts(config, tmp_path / "workloads", lambda _: None) as parts:
        looks = []
        usage = parts.inventory.usage

        def count() -> object:
            looks.append(1)
            return usage()

        monkeypatch.setattr(parts.inventory, "usage", count)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(parts.foreign.look, parts.workloads)
        assert len(looks) == 2  # the one under way may have begun too early for the others


CANT_LIST = "nvmlDeviceGetComputeRunningProcesses"
UNKNOWN_ERROR = 999


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """A process that uses no GPU."""
    with subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.DEVNULL) as process:
        try:
            root = identify(process.pid)
            assert root is not None
            yield process, root
        finally:
            process.kill()


def claim(parts: Parts, root: ProcessIdentity, gpu_uuid: str, workload_id: str = "w-1") -> Workload:
    """A claim that is over at once unless its process lives."""
    workload = workload_of(root, workload_id)
    workload.lease = parts.pool.claim_gpus(workload_id, [gpu_uuid])
    parts.exit_monitor.add(workload)
    return workload


@contextmanager
def counting(
    gpu_uuid: str, host: SimulatedHost | None = None
) -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    """A counter on a GPU that counts already. The host is that of the environment unless it is given."""
    with subprocess.Popen(
        [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(host.environment() if host else {}), "CUDA_VISIBLE_DEVICES": gpu_uuid},
    ) as process:
        try:
            assert process.stdout is not None
            while "count=" not in process.stdout.readline():
                assert process.poll() is None
            threading.Thread(target=process.stdout.read, daemon=True).start()
            root = identify(process.pid)
            assert root is not None
            yield process, root
        finally:
            process.kill()


async def until(parts: Parts, condition: Callable[[], bool]) -> None:
    """Waits until something holds of the pool."""
    with trio.fail_after(20):
        while not condition():
            await parts.pool.slots.wait_changed()


async def kept_until_it_is_seen(host: SimulatedHost, folder: Path, **fault: Any) -> None:
    inventory.ANSWER_TIMEOUT_S, foreign_processes.LOOK_AGAIN_S = 0.5, 0.05  # type: ignore[misc]
    gpu_uuid = host.gpus[0].uuid
    config = WorkerConfig(state_dir=folder)
    async with open_parts(config, folder, lambda _: None) as parts:
        with counting(host.gpus[0].uuid) as (counter, root):
            workload = claim(parts, root, gpu_uuid)
            await parts.foreign.look(parts.workloads)
            host.set_fault(CANT_LIST, **fault)
            await parts.exit_monitor.let_go(workload)
            slot = parts.pool.slots.get(gpu_uuid)
            assert (slot.state, slot.lease) == (FOREIGN, None)
            (entry,) = slot.foreign
            assert (entry.pid, entry.device_memory_bytes) == (counter.pid, None)
            assert "NVML can't list the processes of this GPU" in entry.command
            assert parts.pool.slots.get(host.gpus[1].uuid).state == FREE, "nobody has left it"
            await parts.foreign.look(parts.workloads)
            assert parts.pool.slots.get(gpu_uuid).foreign == (entry,), "it is no better known"
            parts.nursery.start_soon(parts.foreign.run, parts.workloads)
            host.clear_faults(call=CANT_LIST)
            await until(parts, lambda: parts.pool.slots.get(gpu_uuid).foreign != (entry,))
            (found,) = parts.pool.slots.get(gpu_uuid).foreign
            assert (found.pid, bool(found.device_memory_bytes)) == (counter.pid, True)
            counter.kill()
            await until(parts, lambda: parts.pool.slots.get(gpu_uuid).state == FREE)


async def nvml_fails_as_a_claim_ends(host: SimulatedHost, folder: Path) -> None:
    await kept_until_it_is_seen(host, folder, error=UNKNOWN_ERROR)


async def nvml_hangs_as_a_claim_ends(host: SimulatedHost, folder: Path) -> None:
    await kept_until_it_is_seen(host, folder, hang=True)


async def nvml_fails_as_the_first_process_of_a_claim_ends(host: SimulatedHost, folder: Path) -> None:
    gpu_uuid = host.gpus[0].uuid
    async with open_parts(WorkerConfig(state_dir=folder), folder, lambda _: None) as parts:
        with sleeper() as (process, root):
            workload = claim(parts, root, gpu_uuid)
            await parts.foreign.look(parts.workloads)
            host.set_fault(CANT_LIST, error=UNKNOWN_ERROR)
            process.kill()
            with trio.fail_after(20):
                await workload.ended.wait()
        slot = parts.pool.slots.get(gpu_uuid)
        assert (slot.state, slot.lease) == (FOREIGN, None)
        assert "possible remains of w-1" in slot.foreign[0].command
        host.clear_faults(call=CANT_LIST)
        await parts.foreign.look(parts.workloads)
        assert parts.pool.slots.get(gpu_uuid).state == FREE


async def nvml_never_lists_processes(host: SimulatedHost, folder: Path) -> None:
    host.set_fault(CANT_LIST, error=UNKNOWN_ERROR)
    kept, free = (gpu.uuid for gpu in host.gpus[:2])
    async with open_parts(WorkerConfig(state_dir=folder), folder, lambda _: None) as parts:
        with sleeper() as (process, root):
            await parts.exit_monitor.let_go(claim(parts, root, kept))
            ended = claim(parts, ProcessIdentity(Pid(2**22 + 1), 1), free, "w-2")
            with trio.fail_after(20):
                await ended.ended.wait()
            await parts.foreign.look(parts.workloads)
            assert [parts.pool.slots.get(gpu_uuid).state for gpu_uuid in (kept, free)] == [FOREIGN, FREE]
            process.kill()
        await parts.foreign.look(parts.workloads)
        assert parts.pool.slots.get(kept).state == FREE


async def a_process_that_can_not_be_read(host: SimulatedHost, folder: Path) -> None:
    foreign_processes.TELL_TIMEOUT_S = 0.2  # type: ignore[misc]
    released, hanging = threading.Event(), []

    def hang(pid: int) -> list[str]:
        assert threading.current_thread() is not threading.main_thread(), "it would hold up all of the worker"
        hanging.append(pid)
        released.wait(20)
        return []

    foreign_processes.command_line = hang  # type: ignore[attr-defined]
    gpu_uuid = host.gpus[0].uuid
    async with open_parts(WorkerConfig(state_dir=folder), folder, lambda _: None) as parts:
        with counting(host.gpus[0].uuid) as (counter, _):
            with trio.fail_after(20):
                await parts.foreign.look(parts.workloads)
                assert parts.pool.slots.get(gpu_uuid).state == FREE, "that look has seen nothing"
                for _ in range(3):
                    await parts.foreign.look(parts.workloads)
            (found,) = parts.pool.slots.get(gpu_uuid).foreign
            assert (found.pid, found.user, found.command) == (counter.pid, str(os.geteuid()), "")
            assert len(hanging) == 1, "it is left alone while somebody hangs at it"
            released.set()
            with trio.fail_after(20):
                while parts.pool.slots.get(gpu_uuid).foreign[0].user == str(os.geteuid()):
                    await parts.foreign.look(parts.workloads)
                    await trio.sleep(0.01)


SCENARIOS = [
    nvml_fails_as_a_claim_ends,
    nvml_hangs_as_a_claim_ends,
    nvml_fails_as_the_first_process_of_a_claim_ends,
    nvml_never_lists_processes,
    a_process_that_can_not_be_read,
]


def play(name: str, directory: str, folder: str) -> None:
    """Plays a scenario in a process of its own: that of the tests has no libnvidia-ml."""
    trio.run(globals()[name], SimulatedHost.open(directory), Path(folder))


@pytest.mark.parametrize("scenario", grid(SCENARIOS, nvml_fails_as_a_claim_ends))
def test_what_nvml_or_the_kernel_does_not_answer_is_not_known(
    scenario: Callable[[SimulatedHost, Path], Awaitable[None]], host: SimulatedHost, tmp_path: Path
) -> None:
    arguments = (scenario.__name__, str(host.directory), str(tmp_path / "state"))
    done = run(
        f"from {__name__} import play; play{arguments!r}",
        [],
        env={**os.environ, **host.environment()},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
