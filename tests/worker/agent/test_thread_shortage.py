"""A worker that can start no thread for a while, as after a fork bomb of a workload."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leasehold_client.errors import LeaseholdError
from leasehold_client.local import LocalWorker
from leasehold_simgpu import SimulatedHost

from tests.prefork import WORKER, Forked
from tests.worker.conftest import WorkerProcess, end_leftovers
from tests.worker.counters import counter_run
from tests.worker.scripted_coordinator import ScriptedCoordinator

SHORT_OF_THREADS = f"""
import os, threading
from pathlib import Path
from trio._core._thread_cache import ThreadCache

shortage = Path(os.environ["SHORTAGE"])
start, start_thread_soon = threading.Thread.start, ThreadCache.start_thread_soon

def require_thread(name):
    if shortage.exists() and shortage.read_text() in name:
        raise RuntimeError("can't start new thread")

def start_unless_short(thread):
    require_thread(thread.name)
    start(thread)

def start_soon_unless_short(*arguments):
    require_thread("trio")
    start_thread_soon(*arguments)

threading.Thread.start = start_unless_short
ThreadCache.start_thread_soon = start_soon_unless_short
{WORKER}
"""
"""A worker that can start no thread whose name has the text of a file. Trio has no idle threads."""

HOLD = """
import sys
from leasehold_client.local import claim
with claim(gpus=0, socket=sys.argv[1]) as lease:
    print("held", flush=True)
    lease.ended.wait()
"""

SHORTAGE_S = 12.0
"""Time in which each task of the worker has its turn: the disk usage is measured every 10 s."""


@pytest.fixture
def shortage(tmp_path: Path) -> Path:
    return tmp_path / "shortage"


@pytest.fixture
def worker(
    tmp_path: Path, host: SimulatedHost, coordinator: ScriptedCoordinator, shortage: Path
) -> Iterator[WorkerProcess]:
    state, log = tmp_path / "state", tmp_path / "worker.log"
    settings = [f"--coordinator={coordinator.address}", f"--state-dir={state}", "--name=alpha"]
    with log.open("wb") as file:
        environment = {**os.environ, **host.environment(), "SHORTAGE": str(shortage)}
        process = Forked(SHORT_OF_THREADS, settings, stdout=file, stderr=file, env=environment)
    started = WorkerProcess(process, log)
    yield started
    if process.poll() is None:
        started.kill()
    end_leftovers(state)


def gpus(socket: Path) -> int | None:
    """The number of GPUs that the local API lists. None: no call is served."""
    try:
        with LocalWorker(socket) as local:
            return len(local.list().gpus)
    except LeaseholdError:
        return None


def wait(condition: Callable[[], bool], worker: WorkerProcess) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert worker.process.poll() is None, worker.log.read_text()
        assert time.monotonic() < deadline, worker.log.read_text()
        time.sleep(0.05)


def test_a_worker_outlives_a_shortage_of_threads(
    worker: WorkerProcess, coordinator: ScriptedCoordinator, tmp_path: Path, shortage: Path
) -> None:
    socket = tmp_path / "state/worker.sock"
    session = coordinator.next_session()
    run = counter_run("one")
    run.spec.resources.disk_bytes = 2**20
    session.run("c1", "w1", run=run)
    session.run("c2", "w2", run=counter_run("two"))
    wait(lambda: gpus(socket) == 4, worker)

    shortage.write_text("")
    (folder,) = (tmp_path / "state/workloads").glob("w2")
    pid = int((folder / "process").read_text().split('"pid":')[1].split(",")[0])
    os.kill(pid, signal.SIGKILL)  # its end is noticed during the shortage
    deadline = time.monotonic() + SHORTAGE_S
    while time.monotonic() < deadline:
        assert gpus(socket) is None
        assert worker.process.poll() is None, worker.log.read_text()
        time.sleep(0.5)
    shortage.unlink()

    wait(lambda: gpus(socket) == 4, worker)
    assert session.run("c3", "w3", run=counter_run("three")).result.claimed_gpu_uuids
    assert worker.stop() == 0, worker.log.read_text()


@contextlib.contextmanager
def claimed(socket: Path) -> Iterator[None]:
    """A claim of another process, which takes a thread of the local API."""
    command = [sys.executable, "-c", HOLD, str(socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert select.select([holder.stdout], [], [], 20)[0], "no claim is granted"
            assert holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.kill()


def test_calls_are_served_while_no_thread_can_be_started_for_them(
    worker: WorkerProcess, coordinator: ScriptedCoordinator, tmp_path: Path, shortage: Path
) -> None:
    socket = tmp_path / "state/worker.sock"
    coordinator.next_session()
    with claimed(socket):
        shortage.write_text("local-api")
        with claimed(socket):
            assert gpus(socket) == 4
    assert worker.stop() == 0, worker.log.read_text()


def test_a_worker_ends_in_time_while_no_thread_can_be_started(
    worker: WorkerProcess, coordinator: ScriptedCoordinator, tmp_path: Path, shortage: Path
) -> None:
    coordinator.next_session()
    with claimed(tmp_path / "state/worker.sock"):
        shortage.write_text("")
        assert worker.stop() == 0, worker.log.read_text()


def test_a_session_that_gets_no_thread_does_not_hang_the_worker(
    worker: WorkerProcess, coordinator: ScriptedCoordinator, tmp_path: Path, shortage: Path
) -> None:
    session = coordinator.next_session()
    shortage.write_text("Thread-")  # each without a name, such as those of gRPC's channels
    session.end()
    wait(lambda: "session ended: [Errno 11] no thread can be started" in worker.log.read_text(), worker)
    for _ in range(3):
        assert gpus(tmp_path / "state/worker.sock") == 4, worker.log.read_text()
        time.sleep(0.5)
    shortage.unlink()
    coordinator.next_session()
    assert worker.stop() == 0, worker.log.read_text()
