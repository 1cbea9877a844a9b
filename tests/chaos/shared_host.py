"""One host with four simulated GPUs that all kinds of holders share, with its worker and a coordinator.

Two users run ``leasehold exec`` (as two users of the system where we are root), a Python program claims for
itself, a coordinator runs workloads, processes that somebody started by hand are adopted, and helpers take
what is left.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from leasehold.local.v1.local_service_pb2 import ListResponse
from leasehold_client.config import credentials_directory
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_client.local import LocalWorker
from leasehold_simgpu import SimulatedHost, Timing

from tests.ports import free_port
from tests.prefork import COORDINATOR, WORKER
from tests.worker.conftest import end_leftovers

GPUS: Final = 4
LOAD_INTERVAL_S: Final = 0.5
START_TIMEOUT_S: Final = 30.0
ROOT: Final = Path(__file__).resolve().parents[2]
COUNTER: Final = [str(ROOT / "examples/counter.py"), "--bytes", "1MiB", "--interval-s", "0.1"]
USERS: Final = {"ann": 61_001, "bob": 61_002}
GROUP: Final = "nogroup"
NEEDED: Final = (
    "import os, sys, grpc, cuda.bindings.driver, leasehold_client.local.lease; os.stat(sys.executable)"
)
EXEC: Final = "import sys; from leasehold_client.main import main; sys.argv[0] = 'leasehold'; main()"
CLAIM: Final = """
import sys
from leasehold_client import local
with local.claim(gpus=int(sys.argv[1]), name=sys.argv[2]) as lease:
    from cuda.bindings import driver
    driver.cuInit(0)
    error, context = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(context)
    driver.cuMemAlloc(1 << 20)
    print("granted", flush=True)
    sys.stdin.read()
    driver.cuDevicePrimaryCtxRelease(0)
print("given back", flush=True)
"""


@dataclass(eq=False, slots=True)
class Holder:
    """A process that was started on the host by hand.

    Attributes:
        name: What its workload is called, if it gets one.
        kind: exec, helper, claim or foreign.
        process: It.
        gpu_count: How many GPUs it wants.
    """

    name: str
    kind: str
    process: subprocess.Popen[bytes]
    gpu_count: int

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None


@final
class SharedHost:
    """The processes. Made by :func:`shared_host`, which ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = SimulatedHost.create(
            folder / "host", gpus=GPUS, chip="H100", timing=Timing.instant(), exclusive_memory=True
        )
        self.address = f"127.0.0.1:{free_port()}"
        self._worker_address = f"127.0.0.1:{free_port()}"
        self.socket = folder / "worker.sock"
        self.holders: list[Holder] = []
        self.cordoned: set[str] = set()
        """GPUs that an operator has cordoned, for certain."""
        self.sick: set[str] = set()
        """GPUs of which something excluding has been told, and that nobody has reset."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = self._open_to_all()
        self.python, self.two_users = self._choose_python()
        self.program = [self.python, *COUNTER]
        self._count = 0
        config = f'socket = "{self.socket}"\n' + (f'socket_group = "{GROUP}"\n' if os.geteuid() == 0 else "")
        (folder / "worker.toml").write_text(f"{config}user_priority_limit = 1\n")

    def _open_to_all(self) -> dict[str, str]:
        """The environment of the host's programs, with files that other users can read and write."""
        environment = {**os.environ, **self.host.environment(), "LEASEHOLD_SOCKET": str(self.socket)}
        library = Path(self.host.environment()["LD_LIBRARY_PATH"].split(":")[0])
        shutil.copytree(library, self.folder / "lib", symlinks=True)
        environment["LD_LIBRARY_PATH"] = str(self.folder / "lib")
        environment["HOME"] = str(self.folder)
        environment["LEASEHOLD_COORDINATOR_STATE_DIR"] = str(credentials_directory())
        environment["LEASEHOLD_CREDENTIALS"] = str(credentials_directory())
        environment["PYTHONPATH"] = ":".join(filter(None, sys.path))
        self.folder.chmod(0o755)  # daemons refuse files in a folder that others may write to
        for path in self.folder.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o777 if path.is_dir() else 0o666 if path.suffix != ".so" else 0o777)
        return environment

    def _choose_python(self) -> tuple[str, bool]:
        """The interpreter for the holders, and whether they can be two users of the system.

        They can't where we are not root, nor where no interpreter can be read by others.
        """
        if os.geteuid() == 0:
            for python in (sys.executable, "/usr/bin/python3"):
                trial = [*_as_user("ann"), python, "-c", NEEDED]
                if (
                    subprocess.run(trial, env=self._environment, capture_output=True, check=False).returncode
                    == 0
                ):
                    return python, True
        return sys.executable, False

    def start_daemon(self, name: str) -> None:
        """Starts the coordinator or the worker."""
        arguments = {
            "coordinator": [
                COORDINATOR,
                "--listen",
                self.address,
                "--worker-listen",
                self._worker_address,
                "--database",
                str(self.folder / "store.sqlite3"),
                "--load-interval",
                str(LOAD_INTERVAL_S),
            ],
            "worker": [
                WORKER,
                "--coordinator",
                self._worker_address,
                "--name",
                "alpha",
                "--state-dir",
                str(self.folder / "alpha"),
                "--config",
                str(self.folder / "worker.toml"),
            ],
        }[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [sys.executable, "-c", *arguments], stdout=log, stderr=log, env=self._environment
            )

    def restart_worker(self, number: signal.Signals) -> None:
        """Ends the worker by a signal, and starts it again."""
        self._daemons["worker"].send_signal(number)
        self._daemons["worker"].wait(START_TIMEOUT_S)
        self.start_daemon("worker")
        self.wait_serving()

    def wait_serving(self) -> None:
        """Waits until the worker serves its socket."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.look()
                return
            except LeaseholdError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def look(self) -> ListResponse:
        """What the worker says of its host."""
        with LocalWorker(self.socket) as worker:
            return worker.list()

    def start(self, kind: str, gpu_count: int, *options: str, user: str = "ann", gpu: str = "") -> Holder:
        """Starts a process of somebody.

        Args:
            kind: exec, helper, claim or foreign.
            gpu_count: How many GPUs it wants.
            options: Of ``leasehold exec``.
            user: Who starts it.
            gpu: UUID of the GPU that a foreign process uses.
        """
        self._count += 1
        name = f"{kind}{self._count}"
        execute = [self.python, "-c", EXEC, "exec", "--gpus", str(gpu_count), "--name", name]
        match kind:
            case "exec" | "helper":
                terms = ["--helper", "suspend", "--yield-grace", "0.2"] if kind == "helper" else []
                command = [*execute, *terms, *options, "--", *self.program]
            case "claim":
                command = [self.python, "-c", CLAIM, str(gpu_count), name]
            case _:
                command = self.program
        environment = {**self._environment, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*(_as_user(user) if self.two_users else ()), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.folder,
            )
        holder = Holder(name, kind, process, gpu_count)
        self.holders.append(holder)
        return holder

    def living(self, *kinds: str) -> list[Holder]:
        """The holders of these kinds that have not ended."""
        return [holder for holder in self.holders if holder.kind in kinds and holder.lives]

    def stop(self) -> None:
        """Ends everything."""
        for process in [*(holder.process for holder in self.holders), *self._daemons.values()]:
            if process.poll() is None:
                process.kill()
            process.wait(START_TIMEOUT_S)
            if process.stdin is not None:
                process.stdin.close()
        end_leftovers(self.folder / "alpha")
        end_leftovers(self.folder)  # where its socket is


def _as_user(user: str) -> Sequence[str]:
    return ("setpriv", "--reuid", str(USERS[user]), "--regid", GROUP, "--clear-groups")


@contextmanager
def shared_host(folder: Path) -> Iterator[tuple[SharedHost, Client]]:
    """A host that has been started, and a client of its coordinator."""
    shared = SharedHost(folder)
    try:
        shared.start_daemon("coordinator")
        shared.start_daemon("worker")
        shared.wait_serving()
        with Client(shared.address) as client:
            yield shared, client
    finally:
        shared.stop()
