"""A real coordinator process with its store, and scripted workers."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold.worker.v1.session_pb2 import ConnectRequest, Hello

from tests.channels import open_channel, open_worker_channel
from tests.listening import start_until_listening
from tests.prefork import COORDINATOR, Forked, run

from .scripted_worker import ScriptedWorker, make_hello

SHORT_REQUESTS: Final = """
from leasehold_coordinator.api import rpc_errors
rpc_errors.REQUEST_TIMEOUT_S = 2.0
"""
"""Prelude of a coordinator that waits two seconds for the request of a call."""


def run_coordinator(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a coordinator that is to end by itself."""
    return run(COORDINATOR, arguments, env=os.environ, timeout=30)


@dataclass
class CoordinatorProcess:
    """The coordinator under test. It keeps its address and store over restarts."""

    folder: Path
    address: str = "127.0.0.1:0"
    worker_address: str = "127.0.0.1:0"
    load_interval_s: float = 5.0
    prelude: str = ""
    """Python that the process runs first, such as to change a limit."""
    options: list[str] = field(default_factory=list)
    """Further options."""
    workers: list[ScriptedWorker] = field(default_factory=list)

    def start(self) -> None:
        """Starts it, and opens the stubs."""
        self.process, self.address, self.worker_address = start_until_listening(self._launch, self.log)
        self.channel = open_channel(self.address)
        self.fleet = FleetServiceStub(self.channel)
        self.workloads = WorkloadServiceStub(self.channel)
        self.commands = CommandServiceStub(self.channel)

    def _launch(self) -> subprocess.Popen[str]:
        listen = ["--listen", self.address, "--worker-listen", self.worker_address]
        options = [*listen, "--database", str(self.folder / "store.sqlite3"), *self.options]
        with (self.folder / "coordinator.log").open("a") as log:
            return Forked(
                f"{self.prelude}\n{COORDINATOR}" if self.prelude else COORDINATOR,
                [*options, "--load-interval", str(self.load_interval_s)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ,
            )

    def log(self) -> str:
        """What it has logged."""
        return (self.folder / "coordinator.log").read_text()

    def connect(self, hello: Hello | None = None, first: ConnectRequest | None = None) -> ScriptedWorker:
        """Connects a worker, with this hello or another first frame."""
        frame = first or ConnectRequest(hello=hello or make_hello())
        options = [("grpc.use_local_subchannel_pool", 1)]
        worker = ScriptedWorker(open_worker_channel(self.worker_address, options), frame)
        self.workers.append(worker)
        return worker

    def end(self, number: signal.Signals) -> int:
        """Ends the process by a signal."""
        self.process.send_signal(number)
        code = self.process.wait(20)
        self.channel.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def restart(self) -> None:
        """Kills it, as a crash would, and starts it again."""
        self.end(signal.SIGKILL)
        self.start()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator on a fresh store."""
    started = CoordinatorProcess(tmp_path)
    started.start()
    yield started
    for worker in started.workers:
        worker.close()
    if started.process.poll() is None:
        assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


@pytest.fixture
def worker(coordinator: CoordinatorProcess) -> ScriptedWorker:
    """The worker alpha with two free GPUs, welcomed."""
    connected = coordinator.connect()
    connected.welcome()
    return connected
