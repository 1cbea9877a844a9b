"""A coordinator, three workers and a user, each in a network namespace, enrolled over mutual TLS."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from leasehold.v1.worker_pb2 import WORKER_STATE_CONNECTED
from leasehold_client.coordinator.client import Client
from leasehold_client.demo.counts import read_counter
from leasehold_simgpu import SimulatedHost, Timing

from tests.chaos.namespaces import HOSTS, NET, PORT, WORKER_PORT, inside, namespaces
from tests.listening import LISTENING
from tests.prefork import COMMAND_LINE, run
from tests.worker.conftest import COUNTER, end_leftovers
from tests.worker.unix_users import (
    ALICE_UID,
    BOB_UID,
    CAPABILITIES,
    RUN_AS,
    WORKER_UID,
    as_user,
    is_readable,
    open_to_others,
    share,
)

WORKERS: Final = ("alpha", "beta", "gamma")
ADDRESS: Final = f"{NET}.{HOSTS['coordinator']}"
GPUS: Final = 2
TIMEOUT_S: Final = 120.0
"""More than a period in which the audit has one row for the refusals of an address."""
UNIX_USERS: Final = {"alice": ALICE_UID, "bob": BOB_UID}
"""Users of Leasehold, and the Unix users of their workloads."""


def why_not() -> str:
    """Why such hosts can't be made here. Empty: they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("setpriv") is None:
        return "only root can make network namespaces and start programs as other users"
    return "" if is_readable() else "other users can't read this checkout and its interpreter"


@final
class ThreeHosts:
    """The daemons and the user's verbs. Made by :func:`three_hosts`, which ends them."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._variables: dict[str, dict[str, str]] = {}
        self._settings = folder / "coordinator.toml"
        self._settings.write_text(settings)
        self._state = folder / "coordinator-state"
        self._client: Client | None = None

    @property
    def socket(self) -> str:
        """Address of the client socket, for admins."""
        return f"unix:{self._state / 'coordinator.sock'}"

    @property
    def client(self) -> Client:
        """A client of an admin, to look with."""
        if self._client is None:
            self._client = Client(self.socket)
        return self._client

    def start_coordinator(self) -> None:
        """Starts the coordinator on an address that the other hosts reach."""
        options = ["--listen", f"{ADDRESS}:{PORT}", "--worker-listen", f"{ADDRESS}:{WORKER_PORT}"]
        options += ["--state-dir", str(self._state), "--config", str(self._settings)]
        process = self._start("coordinator", ["coordinator", *options], {})
        assert process.stdout is not None
        line = process.stdout.readline()
        assert LISTENING.search(line), (line, self.log("coordinator"))

    def token(self, kind: str, name: str, *options: str) -> str:
        """A new join token."""
        return self.admin("token", "create", f"--{kind}", name, *options).strip()

    def join_worker(self, name: str, token: str, host: str = "") -> None:
        """Starts a worker without root that joins by a token.

        Args:
            name: Its name.
            token: The join token.
            host: The host, if it is not the one with the worker's name.
        """
        folder = self.folder / f"{name}{host}"
        folder.mkdir()
        variables = self._variables.get(host or name)
        if variables is None:
            simulated = SimulatedHost.create(
                folder / "host", gpus=GPUS, chip="H100", timing=Timing.instant(), exclusive_memory=True
            )
            variables = self._variables[name] = share(simulated, folder / "files")
        state, config, file = folder / "state", folder / "worker.toml", folder / "join"
        state.mkdir()
        config.write_text(f"host_memory_reserve_bytes = 0\n{RUN_AS}")
        file.write_text(token)
        for path in (state, file):
            os.chown(path, WORKER_UID, WORKER_UID)
        open_to_others(folder)
        options = ["--state-dir", str(state), "--config", str(config), "--join-file", str(file)]
        options += ["--name", name, "--stop-workloads", "stop"]
        self._start(
            f"{name}{host}",
            ["worker", *options],
            {**variables, "HOME": str(state)},
            host=host or name,
            wrapper=as_user(WORKER_UID, *CAPABILITIES),
        )

    def _start(
        self,
        name: str,
        arguments: list[str],
        variables: dict[str, str],
        *,
        host: str = "",
        wrapper: list[str] | None = None,
    ) -> subprocess.Popen[str]:
        command = [
            *inside(host or name),
            *(wrapper or []),
            sys.executable,
            "-m",
            "leasehold_client",
            *arguments,
        ]
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **variables}
            )
        return self.processes[name]

    def admin(self, *arguments: str) -> str:
        """Runs a verb as the coordinator's user, and returns what it prints."""
        variables = {**os.environ, "LEASEHOLD_COORDINATOR": self.socket}
        done = run(COMMAND_LINE, arguments, timeout=TIMEOUT_S, env=variables)
        assert done.returncode == 0, (arguments, done)
        return done.stdout

    def user_command(self, user: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """The command line of a user's verb on the laptop, with its variables."""
        home = self.folder / f"home-{user}"
        home.mkdir(exist_ok=True, mode=0o700)
        variables = {**os.environ, "HOME": str(home)}
        for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "LEASEHOLD_COORDINATOR", "LEASEHOLD_CREDENTIALS"):
            variables.pop(name, None)
        return [*inside("laptop"), sys.executable, "-m", "leasehold_client", *arguments], variables

    def verb(self, user: str, *arguments: str, code: int = 0) -> str:
        """Runs a verb of a user on the laptop, and returns what it prints."""
        command, variables = self.user_command(user, *arguments)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables, check=False
        )
        assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def login(self, user: str, role: str) -> None:
        """Enrols a user and gives it a role."""
        file = self.folder / f"{user}.join"
        file.write_text(self.token("user", user))
        self.verb(user, "login", "--token", str(file))
        self.admin("access", "grant", role, f"user/{user}")

    def run_counter(self, user: str, name: str, worker: str, gpus: int = 1) -> None:
        """Starts a counter of a user, and waits until it counts."""
        options = ["--name", name, "--worker", worker, "--gpus", str(gpus), "--"]
        self.verb(
            user, "run", *options, sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.05"
        )
        self.wait_counting(name)

    def wait_counting(self, name: str) -> None:
        """Waits until a counter has counted on; nothing may be lost."""

        def counts() -> int:
            report = read_counter(b"".join(self.client.output(name)).decode())
            assert (report.lost, report.corrupt) == (0, 0)
            return report.counts

        goal = counts() + 2
        self.wait(lambda: counts() >= goal)

    def unix_user(self, name: str) -> int:
        """The real user id of a workload's first process. Process ids are not of a namespace."""
        status = self.client.workload(name).status
        text = Path(f"/proc/{status.root_pid}/status").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("Uid:"))
        (uid,) = {int(word) for word in line.split()[1:]}
        return uid

    def is_connected(self, name: str) -> bool:
        """Whether a worker has a session."""
        return any(
            worker.name == name and worker.state == WORKER_STATE_CONNECTED for worker in self.client.workers()
        )

    def wait_audited(self, *words: str) -> None:
        """Waits until a line of the audit has all of these words. Rows of refusals are written later."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            text = self.admin("get", "audit")
            if any(all(word in line for word in words) for line in text.splitlines()):
                return
            assert time.monotonic() < deadline, (words, text)
            time.sleep(0.5)

    def log(self, name: str) -> str:
        """What a daemon has logged."""
        return (self.folder / f"{name}.log").read_text()

    def wait(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Polls until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, {name: self.log(name)[-2000:] for name in self.processes}
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends everything, workers first; each must end well."""
        if self._client is not None:
            self._client.close()
        for name, process in sorted(self.processes.items(), key=lambda item: item[0] == "coordinator"):
            if process.poll() is None:
                process.terminate()
            process.wait(TIMEOUT_S)
            assert "Traceback" not in self.log(name), self.log(name)[-3000:]

    def kill(self) -> None:
        """Ends what still runs after a failure."""
        for name, process in self.processes.items():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(TIMEOUT_S)
            assert process.stdout is not None
            process.stdout.close()
            if name != "coordinator":
                end_leftovers(self.folder / name / "state")


@contextmanager
def three_hosts(folder: Path, settings: str = "") -> Iterator[ThreeHosts]:
    """The hosts, with three workers that have joined.

    Args:
        folder: A folder for all files.
        settings: The coordinator's settings, as TOML.
    """
    open_to_others(folder)
    with namespaces():
        hosts = ThreeHosts(folder, settings)
        try:
            hosts.start_coordinator()
            for name in WORKERS:
                hosts.join_worker(name, hosts.token("worker", name))
            for name in WORKERS:
                hosts.wait(lambda name=name: hosts.is_connected(name))  # type: ignore[misc]
            yield hosts
            hosts.stop()
        finally:
            hosts.kill()
