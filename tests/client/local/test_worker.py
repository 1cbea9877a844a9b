"""A user whom the worker's socket is closed to is told which group may use it, and what to ask for."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

import pytest
from leasehold.local.v1.local_service_pb2 import ClaimOpen, ClaimRequest
from leasehold_client.cli import exec_wait
from leasehold_client.errors import LeaseholdError
from leasehold_client.local import claim, worker
from leasehold_client.local.worker import LocalWorker, NoWorkerError
from leasehold_client.messages import duration

AS_ANOTHER_USER = """
import importlib, os, pkgutil, sys
import leasehold_client
for module in pkgutil.walk_packages(leasehold_client.__path__, "leasehold_client."):
    if not module.name.endswith("__main__"):  # now: a checkout may be its owner's alone
        importlib.import_module(module.name)
from leasehold_client.main import main
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
main()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket that nobody but root may use, in a folder that everybody may search."""
    with TemporaryDirectory(dir="/tmp") as folder, closing(socket.socket(socket.AF_UNIX)) as listening:
        Path(folder).chmod(0o755)
        found = Path(folder) / "worker.sock"
        listening.bind(str(found))
        listening.listen()
        found.chmod(0)
        yield found
        Path(folder).chmod(0o700)


def run(path: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER_USER, *arguments],
        env={**os.environ, "LEASEHOLD_SOCKET": str(path), "HOME": "/"},  # the user's own may be closed to it
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("verb", "code"), [(["exec", "--", "true"], 125), (["local", "leases"], 1)])
def test_a_closed_socket_names_its_group_and_the_remedy(path: Path, verb: list[str], code: int) -> None:
    ended, stderr = run(path, *verb)
    assert ended == code
    assert f"may not use the worker's socket {path}, which belongs to group " in stderr
    assert "join that group, or ask for the worker's setting `socket_group`" in stderr


@pytest.mark.long
def test_a_closed_folder_is_told(path: Path) -> None:
    path.parent.chmod(0)
    code, stderr = run(path, "exec", "--", "true")
    assert code == 125
    assert "whose folder is closed to this user: ask for the worker's setting `socket_group`" in stderr


AS_PROGRAM = AS_ANOTHER_USER.replace(
    "main()\n", "from leasehold_client.local.worker import LocalWorker\nLocalWorker().list()\n"
)


@pytest.mark.long
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_closed_socket_of_a_coordinator_is_told_at_once(path: Path, is_folder: bool) -> None:
    if is_folder:
        path.parent.chmod(0)
    code, stderr = run(path, "get", "gpus", "--coordinator", f"unix:{path}")
    assert code == 1, stderr
    assert "waiting" not in stderr
    what = f"the directory {path.parent}" if is_folder else "the socket"
    assert f"may not use the coordinator's socket {path}: {what} belongs to user " in stderr
    assert "with mode 0000; call as " in stderr


@pytest.mark.long
def test_a_program_is_told_that_the_socket_is_closed(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_PROGRAM],
        env={**os.environ, "LEASEHOLD_SOCKET": str(path)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"may not use the worker's socket {path}, which belongs to group " in done.stderr


@pytest.mark.parametrize(("name", "what"), [("", "not a socket"), ("none", "no such socket")])
def test_a_path_that_is_no_socket_is_told(tmp_path: Path, name: str, what: str) -> None:
    with LocalWorker(tmp_path / name) as local, pytest.raises(NoWorkerError) as error:
        local.list()
    assert error.value.message.startswith(f"no worker answers at {tmp_path / name} ({what}): start ")


@pytest.fixture
def silent_path() -> Iterator[Path]:
    """A socket that accepts connections and does not respond, as that of a stopped worker."""
    with TemporaryDirectory(dir="/tmp") as folder, closing(socket.socket(socket.AF_UNIX)) as listening:
        found = Path(folder) / "worker.sock"
        listening.bind(str(found))
        listening.listen()
        yield found


def test_a_silent_worker_ends_the_wait_of_a_claim(silent_path: Path) -> None:
    told: Queue[LeaseholdError] = Queue()

    def wait() -> None:
        try:
            with claim(wait_s=0, socket=silent_path):
                pass
        except LeaseholdError as error:
            told.put(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    message = told.get(timeout=15).message  # gRPC's own timeout is 20 s
    thread.join()
    assert message.startswith(f"the worker at {silent_path} did not answer in time: a process listens there")


def test_a_silent_worker_is_told_of(silent_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CALL_TIMEOUT_S", 0.1)
    with LocalWorker(silent_path) as local, pytest.raises(NoWorkerError) as error:
        local.list()
    assert error.value.message.endswith("does not respond; look at the process and its log")


def test_exec_says_that_a_worker_is_silent(
    silent_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "SHORTEST_CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(exec_wait, "SILENCE_S", 0.1)
    opened = ClaimOpen(wait=duration(0))
    with pytest.raises(NoWorkerError, match="did not answer in time"):
        exec_wait.wait_granted(silent_path, ClaimRequest(open=opened))
    assert capsys.readouterr().err == f"leasehold: the worker at {silent_path} does not answer yet\n"
