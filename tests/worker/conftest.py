"""A simulated GPU host for the worker's parts that run in the test's own process."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.driver.helper_pool import Driver, open_driver
from leasehold_worker.host.processes import ProcessIdentity, identify

from tests.prefork import WORKER, Forked

from .criu_cases import MakeCriu, criu_setting, fake_criu
from .scripted_coordinator import ScriptedCoordinator, Session

COUNTER = Path(__file__).resolve().parents[2] / "examples/counter.py"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedHost:
    """Four equal simulated GPUs. Driver helpers and targets started from the test run on it."""
    simulated = SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())
    for name, value in simulated.environment().items():
        monkeypatch.setenv(name, value)
    return simulated


@pytest.fixture
async def driver(host: SimulatedHost) -> AsyncIterator[Driver]:
    """The driver of the simulated host."""
    async with open_driver() as opened:
        yield opened


@dataclass(slots=True)
class Counter:
    """A running counter, as a member of nobody's workload."""

    process: subprocess.Popen[bytes]
    output: Path
    identity: ProcessIdentity = field(init=False)

    def __post_init__(self) -> None:
        identity = identify(self.process.pid)
        assert identity is not None
        self.identity = identity

    def counts(self) -> list[int]:
        """The counts printed so far."""
        lines = self.output.read_text().splitlines()
        return [int(line.split()[0].removeprefix("count=")) for line in lines if line.startswith("count=")]

    async def wait_count(self, more: int = 2) -> None:
        """Waits until it has counted on."""
        target = len(self.counts()) + more
        with trio.fail_after(30):
            while len(self.counts()) < target:
                assert self.process.poll() is None, self.output.read_text()
                await trio.sleep(0.01)


@pytest.fixture
def start_counter(host: SimulatedHost, tmp_path: Path) -> Iterator[Callable[..., Counter]]:
    """Starts counters on the simulated host, and kills them at the end."""
    started: list[Counter] = []

    def start(gpu: int = 0) -> Counter:
        output = tmp_path / f"counter{len(started)}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": host.gpus[gpu].uuid},
                start_new_session=True,
            )
        counter = Counter(process, output)
        started.append(counter)
        return counter

    yield start
    for counter in started:
        counter.process.kill()
        counter.process.wait(timeout=10)


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    scripted = ScriptedCoordinator()
    scripted.load_interval_s = 0.5  # many tests wait for the next load, which tells of every lease
    yield scripted
    scripted.stop()


@dataclass
class WorkerProcess:
    """A worker started for a test."""

    process: Forked
    log: Path

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        """Ends it at once. Its workloads go on."""
        self.process.kill()
        self.process.wait(timeout=30)


def end_leftovers(state_directory: Path) -> None:
    """Kills the programs that a worker left running, and removes what was behind its socket."""
    socket = (state_directory / "worker.sock").absolute()
    name = f"leasehold-{hashlib.sha256(os.fsencode(socket)).hexdigest()[:12]}-*"
    for folder in (Path(tempfile.gettempdir()), Path("/tmp")):
        for left in folder.glob(name):
            shutil.rmtree(left, ignore_errors=True)
    for path in state_directory.glob("workloads/*/process"):
        if not path.read_text().startswith("{"):
            continue  # its start was given up
        facts = json.loads(path.read_text())
        for who in ("", "launcher_"):
            pid, start_time_ticks = facts[f"{who}pid"], facts[f"{who}start_time_ticks"]
            now = identify(pid)
            if now is not None and now.start_time_ticks != start_time_ticks:
                continue  # it has ended, and somebody else has its pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def start_worker(tmp_path: Path, coordinator: ScriptedCoordinator) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(
        host: SimulatedHost | None, state: str = "state", crash_point: str = "", **options: str
    ) -> WorkerProcess:
        log = tmp_path / f"worker{len(started)}.log"
        settings = {
            "coordinator": coordinator.address,
            "state-dir": str(tmp_path / state),
            "name": "alpha",
            "stop-workloads": "stop",
        }
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in (settings | options).items()]
        with log.open("wb") as file:
            process = Forked(
                WORKER,
                arguments,
                stderr=file,
                stdout=file,
                env={
                    **os.environ,
                    **(host.environment() if host else {}),
                    "LEASEHOLD_CRASH_POINT": crash_point,
                },
            )
        started.append(WorkerProcess(process, log))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.poll() is None:
            worker.stop()
    for state in tmp_path.glob("state*"):
        end_leftovers(state)


@pytest.fixture
def make_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCriu:
    def make(scenario: str) -> CriuFacts:
        monkeypatch.setenv("FAKE_CRIU", scenario)
        return fake_criu(tmp_path)

    return make


@pytest.fixture
def with_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has workers that get no configuration use the CRIU of ``make criu``."""
    settings = tmp_path / "criu.toml"
    settings.write_text(criu_setting())
    monkeypatch.setenv("LEASEHOLD_WORKER_CONFIG", str(settings))


@pytest.fixture
def session(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> Session:
    start_worker(host)
    return coordinator.next_session()
