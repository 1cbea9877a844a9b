"""Workers and programs of several Unix users, by numbers that no user of this host needs to have.

Only root can start a process as another user, so tests with these users are skipped elsewhere.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from leasehold_client.config import credentials_directory
from leasehold_simgpu import SimulatedHost

from tests import environment
from tests.worker.conftest import COUNTER, end_leftovers
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session

WORKER_UID = 2000
ALICE_UID, BOB_UID = 2001, 2002
RUN_AS = 'adopt_users = ["*"]\n[run_as]\n"user/alice" = "2001:2001"\n"user/bob" = "2002:2002"\n'
CAPABILITIES = ("sys_ptrace", "kill", "setuid", "setgid", "chown")
"""All that docs/security.md gives to a worker without root."""

START = """
import sys
from pathlib import Path
from leasehold_worker.agent.cli import command
from leasehold_worker.host import limit_files

limit_files.FOLDER = Path(sys.argv.pop(1))
command()
"""
"""Starts a worker whose users have the limits of a folder."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can start a worker and programs as other users",
)


def open_to_others(folder: Path) -> None:
    """Lets other users pass through a folder of this run, or of the runner of a grid."""
    run_folder = Path(os.environ.get(environment.MARK, tempfile.gettempdir()))
    for part in (folder, *folder.parents):
        if part.is_relative_to(run_folder):
            part.chmod(part.stat().st_mode | 0o011)


def as_user(uid: int, *capabilities: str) -> list[str]:
    """The wrapper that starts a command as a user with ambient capabilities."""
    sets = ",".join(f"+{name}" for name in capabilities)
    granted = [f"--inh-caps={sets}", f"--ambient-caps={sets}"] if sets else []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *granted, "--"]


def is_readable() -> bool:
    """Whether other users can run this checkout's programs."""
    # The shell starts the interpreter, because setpriv itself still has root's capabilities at its exec.
    code = f"open({str(COUNTER)!r}).read(); import trio"
    trial = [*as_user(ALICE_UID), "sh", "-c", 'exec "$@"', "sh", sys.executable, "-c", code]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def share(host: SimulatedHost, folder: Path) -> dict[str, str]:
    """The environment of a simulated host whose files every user can use."""
    folder.mkdir(exist_ok=True)
    library = Path(host.environment()["LD_LIBRARY_PATH"].split(":")[0])
    shutil.copytree(library, folder / "lib", symlinks=True)
    for root in (Path(host.environment()["LEASEHOLD_SIMGPU_DIR"]), folder / "lib"):
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o777 if path.is_dir() or path.suffix == ".so" else 0o666)
        open_to_others(root)
    return {**host.environment(), "LD_LIBRARY_PATH": str(folder / "lib")}


def give_credentials(folder: Path, uid: int) -> Path:
    """A copy of the run's credentials that a user can read."""
    copy = folder / "credentials"
    copy.mkdir()
    for name in ("ca.pem", "worker.token"):
        shutil.copy2(credentials_directory() / name, copy)
    for path in (copy, *copy.iterdir()):
        os.chown(path, uid, uid)
    return copy


@contextmanager
def user_worker(
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    folder: Path,
    settings: str = RUN_AS,
    capabilities: tuple[str, ...] = CAPABILITIES,
    uid: int = WORKER_UID,
) -> Iterator["UserWorker"]:
    """A worker of a user of its own, with exactly these capabilities, or of root."""
    if not is_readable():
        pytest.skip("other users can't read this checkout and its interpreter")
    started = UserWorker(coordinator.address, folder, share(host, folder), settings, capabilities, uid)
    started.next_session = coordinator.next_session
    try:
        started.start()
        yield started
        started.stop()
    finally:
        started.clean_up()


class UserWorker:
    """The worker's process, and its state directory.

    Attributes:
        state: The state directory.
        limits: The folder in place of /etc/security.
        variables: The environment, which programs on its host can have too.
        log: The file of its log.
        process: The process.
        session: Its last session with a scripted coordinator.
    """

    process: subprocess.Popen[bytes]
    session: Session

    def __init__(
        self,
        address: str,
        folder: Path,
        variables: dict[str, str],
        settings: str,
        capabilities: tuple[str, ...] = CAPABILITIES,
        uid: int = WORKER_UID,
    ) -> None:
        open_to_others(folder)
        self.next_session: Callable[[], Session] | None = None
        """Waits for the session of a started worker. None: the test waits in its own way."""
        self.state = folder / "state"
        self.state.mkdir()
        os.chown(self.state, uid, uid)
        self.limits = folder / "limits"
        self.limits.mkdir()
        self.log = folder / "worker.log"
        config = folder / "worker.toml"
        config.write_text(settings)
        self._command = [
            *as_user(uid, *capabilities),
            *(sys.executable, "-c", START, str(self.limits)),
            f"--coordinator={address}",
            f"--state-dir={self.state}",
            f"--credentials={give_credentials(folder, uid)}",
            f"--config={config}",
            "--name=alpha",
            "--stop-workloads=leave",
        ]
        self.variables = {**os.environ, **variables, "HOME": str(self.state)}

    def start(self, crash_point: str = "") -> None:
        """Starts the worker, which is killed at a crash point, and waits for its session."""
        variables = {**self.variables, "LEASEHOLD_CRASH_POINT": crash_point}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=variables, stdout=log, stderr=log)
        if self.next_session is not None:
            self.session = self.next_session()

    def stop(self) -> None:
        """Ends the worker. Its workloads continue."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=30) == 0, self.log.read_text()

    def restart(self) -> None:
        """Kills the worker, and starts it again."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(timeout=30)
        self.start()

    def clean_up(self) -> None:
        """Kills the worker and its workloads."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        end_leftovers(self.state)
