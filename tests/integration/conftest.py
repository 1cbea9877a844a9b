"""A real fleet: coordinator and workers as processes, on simulated hosts, driven by the command line."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1.fleet_pb2 import WorkerState
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.local_pb2 import ListResponse
from leasehold.v1.workload_pb2 import Workload
from leasehold_client.client import Client
from leasehold_client.demo_counts import CounterReport, read_counter
from leasehold_client.local import LocalWorker, NoWorkerError
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.processes import Pid, identify

from tests.prefork import COMMAND_LINE, WORKER, Forked, run
from tests.worker.conftest import end_leftovers

COUNTER = Path(__file__).resolve().parents[2] / "examples/counter.py"
LEASEHOLD = [sys.executable, "-m", "leasehold_client"]
TIMEOUT_S = 30
CRASH_POINT = "LEASEHOLD_CRASH_POINT"


@dataclass
class Fleet:
    """The daemons of one test."""

    folder: Path
    address: str = ""
    hosts: dict[str, SimulatedHost] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _client: Client | None = None

    def start_coordinator(self) -> None:
        """Starts the coordinator, on the address of an earlier one if there was one."""
        listen = self.address or "127.0.0.1:0"
        process = self._start(
            "coordinator", "coordinator", "--listen", listen, "--database", str(self.folder / "store.sqlite3")
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"leasehold coordinator listening on (\S+)\n", line)
        assert match, (line, self.log("coordinator"))
        self.address = match[1]

    def kill_coordinator(self) -> None:
        """Kills it, as a crash would."""
        process = self.processes.pop("coordinator")
        process.kill()
        process.wait(TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()

    def end_worker(self, name: str, number: int = signal.SIGKILL) -> None:
        """Ends a worker by a signal."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()

    def start_worker(
        self, name: str, gpus: int = 4, *, settings: str = "", crash_point: str = ""
    ) -> SimulatedHost:
        """Starts a worker on a simulated host of its own, and waits until its GPUs are known.

        Args:
            name: What it is called.
            gpus: How many its host has.
            settings: Its configuration, as TOML.
            crash_point: Where it is killed. Empty: nowhere.
        """
        if name not in self.hosts:
            folder = self.folder / f"{name}-host"
            self.hosts[name] = SimulatedHost.create(folder, gpus=gpus, chip="H100", timing=Timing.instant())
        host = self.hosts[name]
        state = str(self.folder / name)
        options = ["--coordinator", self.address, "--state-dir", state, "--name", name]
        if "stop_workloads" not in settings:
            options += ["--stop-workloads", "stop"]
        if settings:
            config = self.folder / f"{name}.toml"
            config.write_text(settings)
            options += ["--config", str(config)]
        environment = {**host.environment(), CRASH_POINT: crash_point}
        self._start(name, "worker", *options, environment=environment)
        self.wait(lambda: self.worker_state(name) == "WORKER_STATE_CONNECTED")
        return host

    @property
    def client(self) -> Client:
        """A client, to look with: a process for each look would take most of the tests' time."""
        if self._client is None:
            self._client = Client(self.address)
        return self._client

    def worker_state(self, name: str) -> str | None:
        """The state of a worker, if it is known."""
        states = (worker.state for worker in self.client.workers() if worker.name == name)
        return next((WorkerState.Name(state) for state in states), None)

    def _start(
        self, name: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = Forked(
                COMMAND_LINE,
                arguments,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )
        return self.processes[name]

    def log(self, name: str) -> str:
        """What a daemon has logged."""
        return (self.folder / f"{name}.log").read_text()

    def cli(self, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a verb, which must exit with the code."""
        done = run(
            COMMAND_LINE,
            arguments,
            timeout=TIMEOUT_S,
            env={**os.environ, "LEASEHOLD_COORDINATOR": self.address, **environment},
        )
        assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Runs a verb with ``-o json``, and reads its document."""
        verb, *others = arguments
        return json.loads(self.cli(verb, "-o", "json", *others, code=code).stdout)

    def refuse(self, *arguments: str, code: int, match: str) -> None:
        """Runs a verb that must be refused with one line."""
        done = self.cli(*arguments, code=code)
        assert done.stdout == ""
        assert re.search(match, done.stderr), done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr

    def run_counter(self, name: str, worker: str = "alpha", gpus: int = 1) -> None:
        """Starts a counter and waits until it counts."""
        options = ["--name", name, "--worker", worker, "--gpus", str(gpus)]
        counter = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]
        self.cli("run", *options, "--", *counter)
        self.wait_counting(name)

    def report(self, name: str) -> CounterReport:
        """What a counter has printed."""
        return read_counter(b"".join(self.client.output(name)).decode())

    def wait_counting(self, name: str) -> CounterReport:
        """Waits until a counter has counted on; nothing may be lost."""
        goal = self.report(name).counts + 2
        self.wait(lambda: self.report(name).counts >= goal)
        report = self.report(name)
        assert (report.lost, report.corrupt) == (0, 0)
        return report

    def leases(self) -> dict[str, str]:
        """Name of the holder by worker/slot."""
        return {
            f"{gpu.worker_name}/{gpu.gpu.slot}": gpu.workload_name
            for gpu in self.client.gpus()
            if gpu.workload_name
        }

    def wait(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Polls until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, {name: self.log(name)[-2000:] for name in self.processes}
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends everything, workers first; each must end well."""
        if self._client is not None:
            self._client.close()
        for name, process in sorted(self.processes.items(), key=lambda item: item[0] == "coordinator"):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
            assert process.stdout is not None
            process.stdout.close()
            assert "Traceback" not in self.log(name)


@contextlib.contextmanager
def make_fleet(folder: Path) -> Iterator[Fleet]:
    """A coordinator without workers."""
    started = Fleet(folder)
    started.start_coordinator()
    try:
        yield started
        started.stop()
    finally:
        for process in started.processes.values():
            process.kill()  # those that were not stopped, since something failed
        for name in started.hosts:
            end_leftovers(folder / name)


@pytest.fixture
def empty_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A coordinator without workers."""
    with make_fleet(tmp_path) as started:
        yield started


@pytest.fixture
def fleet(empty_fleet: Fleet) -> Fleet:
    """A coordinator and the worker alpha with four GPUs."""
    empty_fleet.start_worker("alpha")
    return empty_fleet


@dataclass
class LocalHost:
    """A worker without a coordinator, and the programs that its local API serves."""

    folder: Path
    simulated: SimulatedHost | None
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    worker: Forked | None = None
    patch: str = ""
    """Python that runs before the worker does."""
    elsewhere: Path | None = None
    """The worker's state directory, where another fixture started it."""

    @property
    def state(self) -> Path:
        return self.elsewhere or self.folder / "state"

    @property
    def socket(self) -> Path:
        return self.state / "worker.sock"

    @property
    def environment(self) -> dict[str, str]:
        """That of a user's shell on this host."""
        host = self.simulated.environment() if self.simulated else {}
        return {**os.environ, **host, "LEASEHOLD_SOCKET": str(self.socket)}

    @property
    def log(self) -> str:
        path = self.folder / "worker.log"
        return path.read_text() if path.exists() else ""

    def start_worker(self, settings: str = "") -> None:
        """Starts the worker, and waits until it serves."""
        config = self.folder / "worker.toml"
        config.write_text(settings)
        code = f"{self.patch}\n{WORKER}"
        options = ["--coordinator=127.0.0.1:1", f"--state-dir={self.state}", f"--config={config}"]
        with (self.folder / "worker.log").open("a") as log:
            self.worker = Forked(code, options, stdout=log, stderr=log, env=self.environment)
        self.wait(self.is_served)

    def is_served(self) -> bool:
        """Whether the worker answers."""
        assert self.worker is not None
        assert self.worker.poll() is None, self.log
        try:
            self.look()
        except NoWorkerError:
            return False
        return True

    def kill_worker(self) -> None:
        """Kills it, as a crash would."""
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait(TIMEOUT_S)

    def stop_worker(self) -> None:
        """Stops it; its workloads go on."""
        assert self.worker is not None
        self.worker.send_signal(signal.SIGTERM)
        assert self.worker.wait(TIMEOUT_S) == 0, self.log

    def look(self) -> ListResponse:
        with LocalWorker(self.socket) as worker:
            return worker.list()

    def states(self) -> list[str]:
        """What the slots are doing."""
        return [SlotState.Name(gpu.state).removeprefix("SLOT_STATE_") for gpu in self.look().gpus]

    def workloads(self) -> dict[str, Workload]:
        """Those that have not ended, by name."""
        return {workload.name: workload for workload in self.look().workloads}

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Starts a program in a session of its own, as from a shell on this host."""
        number = len(self.started)
        paths = [self.folder / f"program{number}.{stream}" for stream in ("out", "err")]
        with paths[0].open("w") as out, paths[1].open("w") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                text=True,
                env={**self.environment, **environment},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def exec(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Starts ``leasehold exec``."""
        return self.start(*LEASEHOLD, "exec", *arguments, **environment)

    def python(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a Python program."""
        return self.start(sys.executable, "-c", code, *arguments)

    def out(self, process: subprocess.Popen[str], stream: str = "out") -> str:
        """What a program has written."""
        return (self.folder / f"program{self.started.index(process)}.{stream}").read_text()

    def err(self, process: subprocess.Popen[str]) -> str:
        return self.out(process, "err")

    def end(self, process: subprocess.Popen[str], code: int = 0) -> str:
        """Waits for a program, which must exit so; returns what it wrote."""
        assert process.wait(TIMEOUT_S) == code, self.out(process) + self.err(process) + self.log[-4000:]
        assert "Traceback" not in self.err(process), self.err(process)
        return self.out(process)

    def run(self, *arguments: str, code: int = 0) -> str:
        """Runs ``leasehold exec`` to its end; returns what it and the command wrote."""
        process = self.exec(*arguments)
        return self.end(process, code) + self.err(process)

    def wait_line(self, process: subprocess.Popen[str], text: str, stream: str = "out") -> None:
        """Waits until a program has written something."""
        self.wait(lambda: text in self.out(process, stream) or process.poll() is not None)
        assert text in self.out(process, stream), self.out(process) + self.err(process) + self.log[-4000:]

    def wait_counting(self, process: subprocess.Popen[str], more: int = 2) -> CounterReport:
        """Waits until a counter has counted on; nothing may be lost."""
        goal = read_counter(self.out(process)).counts + more
        self.wait(lambda: read_counter(self.out(process)).counts >= goal or process.poll() is not None)
        report = read_counter(self.out(process))
        assert report.counts >= goal, self.err(process)
        assert (report.lost, report.corrupt) == (0, 0)
        return report

    def wait(self, condition: Callable[[], bool]) -> None:
        """Polls until the condition holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.log[-4000:]
            time.sleep(0.05)

    def clear(self) -> None:
        """Ends the programs."""
        for process in self.started:
            if process.returncode is None or identify(Pid(process.pid)) is None:  # not somebody else's by now
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)
            if process.stdin is not None:
                process.stdin.close()
                process.stdin = None

    def close(self) -> None:
        """Ends everything. The worker must end well."""
        self.clear()
        if self.worker is not None and self.worker.poll() is None:
            self.stop_worker()
        assert "Traceback" not in self.log, self.log


COUNTING = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]

CLAIMING_COUNTER = f"""
import runpy, sys
from leasehold_client import local
with local.claim(name=sys.argv[1]) as lease:
    sys.argv = {COUNTING[1:]!r}
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that claims a GPU under the name that it is given, and counts on it."""


def make_local_host(folder: Path, gpus: int) -> LocalHost:
    """A host with so many GPUs, of which no worker is started yet. 0: there is no driver either."""
    folder.mkdir()
    if not gpus:
        return LocalHost(folder, None)
    simulated = SimulatedHost.create(folder / "gpus", gpus=gpus, chip="H100", timing=Timing.instant())
    return LocalHost(folder, simulated)


@pytest.fixture
def new_host(tmp_path: Path) -> Iterator[Callable[[int], LocalHost]]:
    """Makes hosts as :func:`make_local_host` does, and ends them."""
    hosts: list[LocalHost] = []

    def new(gpus: int) -> LocalHost:
        hosts.append(make_local_host(tmp_path / f"host{len(hosts)}", gpus))
        return hosts[-1]

    yield new
    for host in hosts:
        host.close()


@pytest.fixture
def restarting_host(new_host: Callable[[int], LocalHost]) -> LocalHost:
    """A host with two GPUs, and a worker that the test may end."""
    host = new_host(2)
    host.start_worker()
    return host


@pytest.fixture
def local_host(shared_host: LocalHost) -> Iterator[LocalHost]:
    """A host with two GPUs, on which nothing runs, and its worker."""
    yield shared_host
    shared_host.clear()
    shared_host.wait(lambda: not (shared_host.look().workloads or shared_host.look().waiting))


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHost]:
    """The host of all tests of a module."""
    host = make_local_host(tmp_path_factory.mktemp("shared") / "host", 2)
    host.start_worker()
    yield host
    host.close()


@pytest.fixture
def alpha(fleet: Fleet, tmp_path: Path) -> Iterator[LocalHost]:
    """The local side of the fleet's worker."""
    (tmp_path / "local").mkdir()
    host = LocalHost(tmp_path / "local", fleet.hosts["alpha"], elsewhere=tmp_path / "alpha")
    yield host
    host.close()
