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

import grpc
from leasehold.v1.worker_pb2 import WorkerState
from leasehold_client.coordinator import channels
from leasehold_client.coordinator.client import Client
from leasehold_client.demo.counts import CounterReport, read_counter
from leasehold_simgpu import SimulatedHost, Timing

from tests.integration.mutual_tls import MutualTls, variables_set
from tests.listening import start_until_listening
from tests.prefork import COMMAND_LINE, Forked, run
from tests.worker.conftest import end_leftovers

COUNTER = Path(__file__).resolve().parents[2] / "examples/counter.py"
LEASEHOLD = [sys.executable, "-m", "leasehold_client"]
TIMEOUT_S = 30
ROOMS = ("protos/gen", "worker", "coordinator", "client", "web", "simgpu")
"""The folders of a checkout that have packages."""

CRASH_POINT = "LEASEHOLD_CRASH_POINT"


@dataclass
class Fleet:
    """The daemons of one test."""

    folder: Path
    options: tuple[str, ...] = ()
    """Further options of the coordinator."""
    mutual: MutualTls | None = None
    """Certificates. None: the fleet uses tokens on loopback."""
    checkout: Path | None = None
    """The checkout whose daemons are started. None: this one."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of the daemons."""
    address: str = ""
    worker_address: str = ""
    hosts: dict[str, SimulatedHost] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _client: Client | None = None

    def start_coordinator(self) -> None:
        """Starts the coordinator, on the address of an earlier one if there was one."""
        # Off loopback, the coordinator requires certificates.
        host = "127.0.0.1" if self.mutual is None else "0.0.0.0"
        ports = (text.rpartition(":")[2] or "0" for text in (self.address, self.worker_address))
        address, worker_address = (f"{host}:{port}" for port in ports)
        options = ["--listen", address, "--worker-listen", worker_address]
        options += ["--database", str(self.folder / "store.sqlite3"), *self.options]
        if self.mutual is not None:
            options += self.mutual.coordinator_options
        _, *addresses = start_until_listening(
            lambda: self._start("coordinator", "coordinator", *options), lambda: self.log("coordinator")
        )
        self.address, self.worker_address = (text.replace("0.0.0.0", "127.0.0.1") for text in addresses)

    def kill_coordinator(self) -> None:
        """Kills it, as a crash would."""
        self.end("coordinator")

    def end(self, name: str, number: int = signal.SIGKILL) -> None:
        """Ends a daemon by a signal."""
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
        options = ["--state-dir", str(self.folder / name), "--name", name]
        if self.mutual is None:
            options += ["--coordinator", self.worker_address]
        else:
            options += ["--join-file", str(self._join_file(name))]
            settings = self.mutual.worker_settings(settings)
        if "stop_workloads" not in settings:
            options += ["--stop-workloads", "stop"]
        if settings:
            config = self.folder / f"{name}.toml"
            config.write_text(settings)
            options += ["--config", str(config)]
        environment = {**self.host_variables(name), CRASH_POINT: crash_point}
        self._start(name, "worker", *options, environment=environment)
        self.wait(lambda: self.worker_state(name) == "WORKER_STATE_CONNECTED")
        return host

    @property
    def programs(self) -> Path:
        """A folder for files of programs, whichever user they run as."""
        folder = self.folder / "programs"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        return folder

    @property
    def program_user(self) -> list[str]:
        """The wrapper that starts a command as the user of the fleet's programs."""
        return [] if self.mutual is None else self.mutual.program_user

    def host_variables(self, name: str) -> dict[str, str]:
        """The variables of the programs on a worker's host."""
        host = self.hosts[name]
        return host.environment() if self.mutual is None else self.mutual.host_variables(name, host)

    def _join_file(self, name: str) -> Path:
        """The file of a worker's join token, which is read at the first start only."""
        file = self.folder / f"{name}.join"
        if not file.exists():
            file.write_text(self.client.enrolment.create_join_token(f"worker/{name}").ticket)
        return file

    def join_worker(self, name: str, token: str = "", *options: str) -> SimulatedHost:
        """Starts a worker whose name and coordinator come from its enrolment.

        Args:
            name: Its state directory and its host.
            token: The join token. Empty: the worker has joined before.
            options: Further options.
        """
        if name not in self.hosts:
            folder = self.folder / f"{name}-host"
            self.hosts[name] = SimulatedHost.create(folder, gpus=1, chip="H100", timing=Timing.instant())
        if token:
            file = self.folder / f"{name}.join"
            file.write_text(token)
            options = ("--join-file", str(file), *options)
        options = ("--state-dir", str(self.folder / name), "--stop-workloads", "stop", *options)
        self._start(name, "worker", *options, environment=self.hosts[name].environment())
        return self.hosts[name]

    def start_lost_worker(self, name: str, address: str) -> None:
        """Starts a worker that will not reach a coordinator at this address."""
        host = SimulatedHost.create(
            self.folder / f"{name}-host", gpus=1, chip="H100", timing=Timing.instant()
        )
        options = ["--coordinator", address, "--state-dir", str(self.folder / name), "--name", name]
        self._start(name, "worker", *options, environment=host.environment())

    @property
    def client(self) -> Client:
        """A client, to look with: a process for each look would take most of the tests' time."""
        if self._client is None:
            with variables_set(self.variables):
                self._client = Client(self.address)
        return self._client

    def open_channel(self) -> grpc.Channel:
        """A channel to the coordinator with the caller's credentials."""
        with variables_set(self.variables):
            return channels.open_channel(self.address, ())

    def worker_state(self, name: str) -> str | None:
        """The state of a worker, if it is known."""
        states = (worker.state for worker in self.client.workers() if worker.name == name)
        return next((WorkerState.Name(state) for state in states), None)

    def _start(
        self, name: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        variables = {**os.environ, **self.environment, **(environment or {})}
        with (self.folder / f"{name}.log").open("a") as log:
            started: subprocess.Popen[str]
            if self.checkout is None:
                started = Forked(COMMAND_LINE, arguments, stdout=subprocess.PIPE, stderr=log, env=variables)
            else:
                variables["PYTHONPATH"] = os.pathsep.join(str(self.checkout / room) for room in ROOMS)
                command = [*LEASEHOLD, *arguments]
                started = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables
                )
        self.processes[name] = started
        return self.processes[name]

    def log(self, name: str) -> str:
        """What a daemon has logged."""
        return (self.folder / f"{name}.log").read_text()

    @property
    def variables(self) -> dict[str, str]:
        """Variables of verbs: the coordinator, and the caller's credentials."""
        credentials = self.mutual.client_variables if self.mutual is not None else {}
        return {"LEASEHOLD_COORDINATOR": self.address, **credentials}

    def cli(self, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a verb, which must exit with the code."""
        done = run(
            COMMAND_LINE,
            arguments,
            timeout=TIMEOUT_S,
            env={**os.environ, **self.variables, **environment},
        )
        assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def start_verb(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts a verb, as users do, whose output the test reads."""
        command = [*LEASEHOLD, *arguments]
        environment = {**os.environ, **self.variables}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Runs a verb with ``-o json``, and reads its document."""
        verb, *others = arguments
        return json.loads(self.cli(verb, "-o", "json", *others, code=code).stdout)

    def refuse(self, *arguments: str, code: int, match: str, waits: bool = False) -> None:
        """Runs a verb that must be refused with one line, after another one if it waits before."""
        done = self.cli(*arguments, code=code)
        assert done.stdout == ""
        *waiting, refusal = done.stderr.splitlines()
        assert re.search(match, refusal), done.stderr
        assert [line.startswith("leasehold: waiting up to 5 s") for line in waiting] == [True] * waits

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
            log = self.log(name)
            assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]


@contextlib.contextmanager
def make_fleet(
    folder: Path,
    *options: str,
    is_mutual: bool = False,
    checkout: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Fleet]:
    """A coordinator without workers.

    Args:
        folder: A folder for the files of all daemons.
        options: Further options of the coordinator.
        is_mutual: Enrol the workers and the caller.
        checkout: The checkout whose daemons are started. None: this one.
        environment: Further variables of the daemons.
    """
    mutual = MutualTls(folder, folder / "store.sqlite3") if is_mutual else None
    started = Fleet(folder, options, mutual, checkout, environment or {})
    started.start_coordinator()
    try:
        yield started
        started.stop()
    finally:
        for process in started.processes.values():
            process.kill()  # those that were not stopped, since something failed
        for name in started.hosts:
            end_leftovers(folder / name)
