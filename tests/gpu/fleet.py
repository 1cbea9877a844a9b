"""A coordinator and a worker as users start them, on the GPUs of this host, driven by the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from leasehold_client.coordinator.client import Client
from leasehold_client.demo.counts import CounterReport, read_counter
from leasehold_client.errors import LeaseholdError

LEASEHOLD: Final = (sys.executable, "-m", "leasehold_client")
WORKER: Final = "here"
TIMEOUT_S: Final = 60.0
STOP_S: Final = 20.0
STILL_ROUNDS: Final = 5


class FleetError(Exception):
    """A daemon or a command did not do what it should."""


class Fleet:
    """The two daemons, with their state in one folder. Made by :func:`fleet`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self._address = ""
        self._client: Client | None = None

    def start(self) -> None:
        """Starts both, and waits until the worker has reported its GPUs."""
        database = str(self.folder / "coordinator.sqlite3")
        listen = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0")
        self._start("coordinator", *listen, "--database", database)
        # One line, "… listening on ADDRESS for clients, ADDRESS for workers"; none if it ended.
        output = self._daemons["coordinator"].stdout
        words = output.readline().split() if output else []
        self._address, worker_address = (words[-6], words[-3]) if len(words) >= 6 else ("", "")
        state = ("--state-dir", str(self.folder / "worker"))
        self._start("worker", "--coordinator", worker_address, "--name", WORKER, *state)
        self._client = Client(self._address)
        self.wait_for(lambda: bool(self.client.gpus()), "the worker's report")

    @property
    def client(self) -> Client:
        """A client, to look with: each command takes a second on a slow host."""
        if self._client is None:
            raise FleetError("the fleet is not started")
        return self._client

    def _start(self, name: str, *arguments: str) -> None:
        settings = self.folder / "empty.toml"  # else those of the host, in /etc/leasehold
        settings.touch()
        with (self.folder / f"{name}.log").open("w") as log:
            self._daemons[name] = subprocess.Popen(
                [*LEASEHOLD, name, "--config", str(settings), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def stop(self) -> None:
        """Ends both, the worker first."""
        self.client.close()
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate(timeout=STOP_S)

    def log(self) -> str:
        """The end of both logs."""
        return "\n".join((self.folder / f"{name}.log").read_text()[-1500:] for name in self._daemons)

    def command(self, *arguments: str) -> str:
        """Runs a command, which must succeed, and returns what it printed.

        Raises:
            FleetError: It failed.
        """
        verb, *others = arguments
        done = subprocess.run(
            [*LEASEHOLD, verb, "--coordinator", self._address, *others],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise FleetError(
                f"leasehold {' '.join(arguments)} exits with {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def get(self, kind: str, *arguments: str) -> Any:
        """The document of `leasehold get`."""
        return json.loads(self.command("get", kind, *arguments, "-o", "json"))

    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that the worker has reported."""
        found: list[dict[str, Any]] = self.get("gpus").get("gpus", [])
        return found

    def state(self, workload: str) -> str:
        """The state of a workload."""
        return str(self.get("workloads", workload)["status"]["state"]).removeprefix("WORKLOAD_STATE_")

    def run(self, name: str, program: Sequence[str], *options: str) -> None:
        """Starts a workload on one GPU, and waits until it counts."""
        self.command("run", "--name", name, "--gpus", "1", "--worker", WORKER, *options, "--", *program)
        self.wait_for(lambda: self.counted(name).counts > 1, f"the first counts of {name}")

    def counted(self, name: str) -> CounterReport:
        """What a workload has counted so far."""
        return read_counter(b"".join(self.client.output(name)).decode())

    def counts_on(self, name: str) -> CounterReport:
        """Waits until a workload counts on, and returns what it has counted.

        Raises:
            FleetError: It stands still, or a count is lost or corrupt.
        """
        goal = self.counted(name).counts + 2
        self.wait_for(lambda: self.counted(name).counts >= goal, f"that {name} counts on")
        return sound(name, self.counted(name))

    def stands_still(self, name: str) -> None:
        """Checks that a workload does not count while a command runs, which takes the time of several counts.

        The last counts may arrive late, so it has some rounds.

        Raises:
            FleetError: It counts.
        """
        counts = []
        for _ in range(STILL_ROUNDS):
            counts.append(self.counted(name).counts)
            self.get("workloads")
            if self.counted(name).counts == counts[-1]:
                return
        raise FleetError(f"{name} counts while it is suspended: {counts}")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Polls until a condition holds.

        Raises:
            FleetError: It does not hold in time, or a daemon has ended.
        """
        deadline = time.monotonic() + TIMEOUT_S
        refusal = ""
        while True:
            try:
                if condition():
                    return
            except LeaseholdError as error:
                refusal = f"; the last answer: {error.message}"
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    raise FleetError(f"the {name} ended with {daemon.returncode}")
            if time.monotonic() > deadline:
                raise FleetError(f"{what} took longer than {TIMEOUT_S:.0f} s{refusal}")
            time.sleep(0.1)


def sound(name: str, report: CounterReport) -> CounterReport:
    """The counts, none of which may be lost or corrupt."""
    if report.lost or report.corrupt:
        raise FleetError(f"{name}: {report.lost} counts are lost, {report.corrupt} corrupt")
    return report


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Starts a fleet, and stops it. A failure shows the logs.

    Processes that are left after a failure carry the mark of their step, and are ended by it.
    """
    started = Fleet(folder)
    try:
        started.start()
        yield started
        started.stop()
    except FleetError:
        print(started.log(), file=sys.stderr)
        raise
