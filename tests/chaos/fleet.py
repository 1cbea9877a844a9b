"""A real coordinator and two real workers on simulated hosts, which can be killed, frozen and cut off."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import grpc
from leasehold.v1 import fleet_service_pb2, worker_pb2
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold_simgpu import SimulatedHost, Timing

from tests.channels import open_channel
from tests.ports import free_port
from tests.prefork import COORDINATOR, WORKER, Forked
from tests.worker.conftest import end_leftovers

WORKERS: Final = ("alpha", "beta")
GPUS: Final = 3
LOAD_INTERVAL_S: Final = 0.5
TIMEOUT_S: Final = 90.0
CHANNEL_OPTIONS: Final = (("grpc.max_reconnect_backoff_ms", 500),)


@final
class ChaosFleet:
    """The processes. Made by :func:`chaos_fleet`, which ends them.

    Attributes:
        folder: Where all of them have their files.
        address: Of the coordinator, over restarts.
        worker_address: Where each worker connects; another one counts from its next start.
        credentials: Directories of credentials of workers that do not use those of this user.
        prefix: Words before the command line of each process, such as those that enter a network namespace.
    """

    def __init__(self, folder: Path, address: str | None = None, session_address: str | None = None) -> None:
        self.folder = folder
        self.address = address or f"127.0.0.1:{free_port()}"
        self.session_address = session_address or f"127.0.0.1:{free_port()}"
        self.worker_address = dict.fromkeys(WORKERS, self.session_address)
        self.credentials: dict[str, Path] = {}
        self.prefix: dict[str, list[str]] = {}
        self.worker_variables: dict[str, dict[str, str]] = {}
        """Variables of a worker's host. Missing: those of its simulated host."""
        self.worker_options: list[str] = []
        self.coordinator_options: list[str] = []
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.starts_of = Counter[str]()
        """Starts of each process in this round. :func:`tests.chaos.runner.play` clears them."""
        self.hosts = {
            name: SimulatedHost.create(
                folder / f"{name}-host",
                gpus=GPUS,
                chip="H100",
                timing=Timing.instant(),
                exclusive_memory=True,
            )
            for name in WORKERS
        }
        self.use_channel(open_channel(self.address, CHANNEL_OPTIONS))

    def use_channel(self, channel: grpc.Channel) -> None:
        """Calls the coordinator through a channel."""
        self.channel = channel
        self.fleet = FleetServiceStub(self.channel)
        self.workloads = WorkloadServiceStub(self.channel)
        self.commands = CommandServiceStub(self.channel)

    def start(self, name: str, crash_point: str = "") -> None:
        """Starts the coordinator or a worker, unless it lives."""
        if self.is_alive(name):
            return
        self.starts_of[name] += 1
        if name == "coordinator":
            environment = {}
            code = COORDINATOR
            arguments = ["--listen", self.address, "--worker-listen", self.session_address]
            arguments += ["--database", str(self.database)]
            arguments += ["--load-interval", str(LOAD_INTERVAL_S), *self.coordinator_options]
        else:
            environment = dict(self.worker_variables.get(name) or self.hosts[name].environment())
            if name in self.credentials:
                environment["LEASEHOLD_CREDENTIALS"] = str(self.credentials[name])
            code = WORKER
            arguments = ["--coordinator", self.worker_address[name], "--name", name]
            arguments += ["--state-dir", str(self.folder / name), *self.worker_options]
        with (self.folder / f"{name}.log").open("ab") as log:
            variables = {**os.environ, **environment, "LEASEHOLD_CRASH_POINT": crash_point}
            if prefix := self.prefix.get(name):
                command = [*prefix, sys.executable, "-c", code, *arguments]
                self.processes[name] = subprocess.Popen(
                    command, stdout=log, stderr=log, env=variables, text=True
                )
            else:
                self.processes[name] = Forked(code, arguments, stdout=log, stderr=log, env=variables)

    @property
    def database(self) -> Path:
        """The coordinator's store."""
        return self.folder / "store.sqlite3"

    @property
    def everybody(self) -> tuple[str, ...]:
        """All processes by name."""
        return ("coordinator", *WORKERS)

    def is_alive(self, name: str) -> bool:
        """Whether a process lives."""
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def kill(self, name: str) -> None:
        """Ends a process as a crash would."""
        self.processes[name].kill()
        self.processes[name].wait(30)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Signals a process."""
        self.processes[name].send_signal(number)

    def heal(self) -> None:
        """Starts whatever is dead, and waits until both workers are in contact."""
        for name in self.everybody:
            self.start(name)
        self.until(lambda: self._connected() == len(WORKERS), "both workers are connected")

    def _connected(self) -> int:
        workers = self.fleet.ListWorkers(fleet_service_pb2.ListWorkersRequest(), timeout=5).workers
        return sum(worker.state == worker_pb2.WORKER_STATE_CONNECTED for worker in workers)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Polls until the condition holds. What the coordinator does not answer is asked again."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                if condition():
                    return
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within {TIMEOUT_S:g} s; logs are in {self.folder}")

    def log(self, name: str) -> str:
        """What a process has logged."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def starts(self, workload_id: str) -> int:
        """How often a workload's program began."""
        return sum(
            len(path.read_text().splitlines())
            for path in (
                *self.folder.glob(f"*/workloads/{workload_id}/work/starts"),
                *self.folder.glob(f"*/users/{workload_id}/starts"),
            )
        )

    def counts(self, workload_id: str) -> list[int]:
        """What a workload has counted."""
        return [
            int(number)
            for path in self.folder.glob(f"*/workloads/{workload_id}/output.log")
            for number in re.findall(r"^count=(\d+) ", path.read_text(), re.MULTILINE)
        ]

    def last_gpu(self, workload_id: str) -> str:
        """The GPU on which a workload has counted last, by its own words. Empty: it has not counted."""
        lines = [
            line
            for path in self.folder.glob(f"*/workloads/{workload_id}/output.log")
            for line in re.findall(r"^count=\d+ gpu=(\S+) ok$", path.read_text(), re.MULTILINE)
        ]
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """Ends everything, workloads included."""
        self.channel.close()
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(30)
        for name in WORKERS:
            end_leftovers(self.folder / name)


@contextmanager
def chaos_fleet(folder: Path) -> Iterator[ChaosFleet]:
    """A fleet that has been started."""
    fleet = ChaosFleet(folder)
    try:
        fleet.heal()
        yield fleet
    finally:
        fleet.stop()
