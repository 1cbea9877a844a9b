"""The daemons of the demonstration: a coordinator, and two workers on simulated hosts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from leasehold_client.client import Client
from leasehold_client.errors import LeaseholdError

WORKERS: Final = ("alpha", "beta")
GPUS_PER_WORKER: Final = 4
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 15.0
LOG_LINES: Final = 15


class DemoError(LeaseholdError):
    """The demonstration can't go on."""


@final
class DemoFleet:
    """The running daemons, with their logs in one folder. Made by :func:`demo_fleet`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{_free_port()}"

    def start_coordinator(self) -> None:
        """Starts a coordinator, on the same address and store as any before it."""
        database = str(self._folder / "coordinator.sqlite3")
        self._start("coordinator", "coordinator", "--listen", self.address, "--database", database)

    def replace_coordinator(self) -> None:
        """Kills the coordinator, as a crash would, and starts another."""
        process = self._processes.pop("coordinator")
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        self.start_coordinator()

    def start_worker(self, name: str) -> None:
        """Starts a worker on a simulated host of its own."""
        host = ("simgpu", "exec", "--gpus", str(GPUS_PER_WORKER), "--chip", "H100", "--")
        worker = ("worker", "--coordinator", self.address, "--name", name)
        state = ("--state-dir", str(self._folder / name))
        self._start(name, *host, sys.executable, "-m", "leasehold_client", *worker, *state)

    def _start(self, name: str, *arguments: str) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "leasehold_client", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises where a daemon has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise DemoError(f"{name} ended with {process.returncode}:\n{self.log_tails()}")

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Polls until the condition holds.

        Raises:
            DemoError: It took too long, or a daemon ended meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                if condition():
                    return
            except LeaseholdError:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise DemoError(f"{what} took longer than {timeout_s:g} s:\n{self.log_tails()}")
            time.sleep(0.05)

    def log_tails(self) -> str:
        """The last lines of every daemon's log."""
        tails = []
        for path in sorted(self._folder.glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)

    def stop(self) -> None:
        """Ends the workers, which end their workloads, and then the coordinator."""
        workers = [process for name, process in self._processes.items() if name != "coordinator"]
        for group in (workers, list(self._processes.values())):
            for process in group:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in group:
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(STOP_TIMEOUT_S)
        self._processes.clear()


@contextmanager
def demo_fleet(folder: Path) -> Iterator[DemoFleet]:
    """Starts the daemons and waits until both workers have reported; ends them on the way out."""
    fleet = DemoFleet(folder)
    try:
        fleet.start_coordinator()
        for name in WORKERS:
            fleet.start_worker(name)
        with Client(fleet.address) as client:
            wanted = len(WORKERS) * GPUS_PER_WORKER
            fleet.wait_for(lambda: len(client.gpus()) == wanted, "the start of the fleet")
        yield fleet
    finally:
        fleet.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
