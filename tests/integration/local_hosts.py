"""A host with its worker, and the local side of it: programs that claim GPUs, and `leasehold exec`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from leasehold.local.v1.local_service_pb2 import ListResponse
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.workload_pb2 import Workload
from leasehold_client.demo.counts import CounterReport, read_counter
from leasehold_client.local import LocalWorker, NoWorkerError
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import identify

from tests.prefork import WORKER, Forked

from .fleets import COUNTER, LEASEHOLD, TIMEOUT_S, Fleet


@dataclass
class LocalHost:
    """A worker, usually without a coordinator, and the programs that its local API serves."""

    folder: Path
    simulated: SimulatedHost | None
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    worker: Forked | None = None
    patch: str = ""
    """Python that runs before the worker does."""
    elsewhere: Path | None = None
    """The worker's state directory, where another fixture started it."""
    variables: dict[str, str] | None = None
    """The variables of the worker's host, where another fixture started it."""
    coordinator: str = "127.0.0.1:1"
    """The worker's coordinator. Nobody serves at the default."""

    @property
    def state(self) -> Path:
        return self.elsewhere or self.folder / "state"

    @property
    def socket(self) -> Path:
        return self.state / "worker.sock"

    @property
    def environment(self) -> dict[str, str]:
        """That of a user's shell on this host."""
        host = self.variables
        if host is None:
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
        options = [f"--coordinator={self.coordinator}", f"--state-dir={self.state}", f"--config={config}"]
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


def local_side(fleet: Fleet, name: str, folder: Path) -> LocalHost:
    """The local side of a fleet's worker.

    Args:
        fleet: The fleet.
        name: The worker.
        folder: A folder for the output of programs, which is made.
    """
    folder.mkdir()
    variables = fleet.host_variables(name)
    return LocalHost(folder, fleet.hosts[name], elsewhere=fleet.folder / name, variables=variables)
