"""A user whom the worker's socket is closed to is told which group may use it, and what to ask for."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from leasehold_client.local.worker import LocalWorker, NoWorkerError

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
    with LocalWorker(tmp_path / name) as worker, pytest.raises(NoWorkerError) as error:
        worker.list()
    assert error.value.message.startswith(f"no worker answers at {tmp_path / name} ({what}): start ")
