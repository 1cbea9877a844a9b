"""The daemons of the demonstration: a coordinator, and two workers on simulated hosts."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

import click

from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.login import login, read_ticket
from leasehold_client.errors import LeaseholdError

STORE: Final = "coordinator.sqlite3"
"""The coordinator's store in the folder of a demonstration."""

FOLDER_MARK: Final = "demonstration"
"""Empty file in the folder of a demonstration. Other state directories have no such file."""

WORKERS: Final = ("alpha", "beta")
USER: Final = "demo"
"""The enrolled user, and its context."""

GPUS_PER_WORKER: Final = 4
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 6.0
KILL_TIMEOUT_S: Final = 2.0
LOG_LINES: Final = 15

_PORTS: Final = range(20_000, 32_000)
"""Ports below Linux's range of ephemeral ports."""

MARK: Final = "LEASEHOLD_DEMO"
"""Environment variable of every process of one demonstration, by which leftovers are found."""


class DemoError(LeaseholdError):
    """The demonstration failed."""


@final
class DemoFleet:
    """The running daemons, with their logs in one folder. Created by :func:`demo_fleet`.

    Args:
        folder: The folder.
        is_mutual: Whether the workers and a user are enrolled, and use mutual TLS.
    """

    def __init__(self, folder: Path, *, is_mutual: bool) -> None:
        self._is_mutual = is_mutual
        self._folder = folder
        self._temporary = folder / "tmp"  # holds the simulated hosts, and is deleted even after a crash
        self._mark = uuid.uuid4().hex
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"unix:{folder.absolute()}/coordinator.sock"
        # On loopback a coordinator asks for tokens, and elsewhere for client certificates.
        host = "0.0.0.0" if is_mutual else "127.0.0.1"  # noqa: S104
        self._client_address = f"{host}:{_free_port()}"
        self._worker_address = f"{host}:{_free_port()}"
        self._join_address = f"{host}:{_free_port()}"
        self._web_address = f"127.0.0.1:{_free_port()}"

    @property
    def coordinator_pid(self) -> int:
        """Process id of the current coordinator."""
        return self._processes["coordinator"].pid

    @property
    def web_url(self) -> str:
        """URL of the web page, with the token of the folder for its login form.

        Browsers send the part after # to nobody.
        """
        token = (self._folder / "client.token").read_text().strip()
        return f"http://{self._web_address}/login#token={token}"

    def start(self) -> None:
        """Starts the daemons, and waits until both workers have reported.

        Raises:
            DemoError: A daemon ended, or the start took too long.
        """
        (self._folder / FOLDER_MARK).touch()
        self._temporary.mkdir(exist_ok=True)
        self._start_coordinator()
        socket_path = Path(self.address.removeprefix("unix:"))
        self.wait_for(socket_path.exists, "the start of the coordinator")
        with Client(self.address) as client:
            if self._is_mutual:
                self._enrol_user(client)
            for name in WORKERS:
                self._start_worker(name, client)
            self.wait_until_reported(client)

    def open_client(self) -> Client:
        """A client of the enrolled user, or of the Unix user."""
        return Client(context=USER) if self._is_mutual else Client(self.address)

    def _enrol_user(self, client: Client) -> None:
        """Enrols a user, whose context is in the folder of the demonstration."""
        os.environ["XDG_CONFIG_HOME"] = str(self._folder / "config")
        ticket = read_ticket(client.enrolment.create_join_token(f"user/{USER}").ticket)
        login(ticket, "", USER)
        client.grant("operator", f"user/{USER}")

    def _start_coordinator(self) -> None:
        listen = ["--listen", self._client_address, "--worker-listen", self._worker_address]
        listen += ["--web", self._web_address]
        if self._is_mutual:
            settings = self._folder / "coordinator.toml"
            settings.write_text('server_names = ["localhost"]\n')
            listen += ["--join-listen", self._join_address, "--config", str(settings)]
        state = ("--state-dir", str(self._folder), "--database", str(self._folder / STORE))
        socket_path = self.address.removeprefix("unix:")
        self._start("coordinator", "coordinator", *listen, *state, "--socket", socket_path)

    def replace_coordinator(self) -> None:
        """Kills the coordinator, and starts another one with the same address and store."""
        process = self._processes.pop("coordinator")
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        self._start_coordinator()

    def _start_worker(self, name: str, client: Client) -> None:
        """Starts a worker on a simulated host of its own.

        The host has exclusive memory: two workloads on one GPU would overwrite each other, and the counters
        would report corrupt bytes.
        """
        gpus = ("--gpus", str(GPUS_PER_WORKER), "--chip", "H100", "--exclusive-memory")
        host = ("simgpu", "exec", *gpus, "--")
        coordinator = ["--coordinator", self._worker_address, "--credentials", str(self._folder)]
        if self._is_mutual:
            file = self._folder / f"{name}.join"
            file.touch(0o600)
            file.write_text(client.enrolment.create_join_token(f"worker/{name}").ticket)
            coordinator = ["--join-file", str(file)]
        worker = ("worker", *coordinator, "--name", name)
        state = ("--state-dir", str(self._folder / name), "--stop-workloads", "stop")
        self._start(name, *host, sys.executable, "-P", "-m", "leasehold_client", *worker, *state)

    def _start(self, name: str, *arguments: str) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LEASEHOLD_")}
        # In a virtual environment, workloads find its Python as `python`, which Debian does not have.
        inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "leasehold_client", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, MARK: self._mark, "TMPDIR": str(self._temporary)},
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises DemoError if a daemon has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise DemoError(f"{name} ended with code {process.returncode}: see its log above")

    def wait_until_reported(self, client: Client) -> None:
        """Waits until the current coordinator knows all GPUs."""
        wanted = len(WORKERS) * GPUS_PER_WORKER
        self.wait_for(lambda: len(client.gpus()) == wanted, "the report of the workers")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Polls until the condition holds. A refusal of the coordinator counts as false.

        Raises:
            DemoError: The wait timed out, or a daemon ended.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        refusal = ""
        while time.monotonic() < deadline:
            self.check()
            try:
                if condition():
                    return
            except DemoError:
                raise
            except LeaseholdError as error:
                refusal = f"; the last answer was: {error.message}"
            time.sleep(0.05)
        raise DemoError(f"{what} took longer than {START_TIMEOUT_S:g} s{refusal}")

    def log_tails(self) -> str:
        """The last lines of each daemon's log."""
        tails = []
        for path in sorted(self._folder.glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)

    def stop(self) -> None:
        """Ends the workers with their workloads, then the coordinator, and kills any process that is left."""
        workers = [process for name, process in self._processes.items() if name != "coordinator"]
        for group in (workers, list(self._processes.values())):
            for process in group:
                process.terminate()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in group:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while self._kill_leftovers() and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self._processes.values():
            process.poll()
        self._processes.clear()

    def _kill_leftovers(self) -> bool:
        """Kills every process with the mark of this demonstration. Returns whether there was one.

        Such a process is a daemon that hangs, or a workload of a dead worker. It may have started another one
        in the meantime.
        """
        mark = f"{MARK}={self._mark}".encode()
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                descriptor = os.pidfd_open(int(entry.name))
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        found = True
                finally:
                    os.close(descriptor)
        return found


@contextmanager
def demo_fleet(folder: Path, *, is_mutual: bool) -> Iterator[DemoFleet]:
    """Starts the daemons, and always ends them. Prints their logs after a failure."""
    fleet = DemoFleet(folder, is_mutual=is_mutual)
    try:
        fleet.start()
        yield fleet
    except LeaseholdError:
        click.echo(fleet.log_tails(), err=True)
        raise
    finally:
        # A second Ctrl-C would leave processes behind. The cleanup takes up to 15 s.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        fleet.stop()


def _free_port() -> int:
    """A free port outside of the ephemeral range, so it stays free while the coordinator is replaced."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
