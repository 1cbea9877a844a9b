"""SIGINT at any moment of a verb leaves no traceback, nor does an output that fails, nor a missing home."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.client.scripted_coordinator import ScriptedCoordinator

INTERRUPTED = """
import os, signal, sys
event, first = sys.argv[1:3]
del sys.argv[1:3]
def interrupt(name, arguments):
    if name == event and (not first or arguments[0] == first):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
from leasehold_client.__main__ import main
main()
"""
"""Sends itself SIGINT at an audit event, as one that the interpreter raises for each import."""

MOMENTS = {
    "the command's own modules": (("import", "click"), "get gpus"),
    "a verb's modules": (("import", "grpc"), "get gpus"),
    "modules of a verb's end": (("import", "leasehold_client.cli.conclusion"), "stop one"),
    "exec's modules": (("import", "grpc"), "exec -- true"),
    "the demonstration's modules": (("import", "leasehold_client.demo.fleet"), "demo"),
    "a worker's modules": (("import", "trio"), "worker"),
    "a worker's driver helper": (("subprocess.Popen", ""), "worker --state-dir state"),
    "a worker's journal": (("sqlite3.connect", ""), "worker --state-dir state"),
    "a coordinator's modules": (("import", "sqlalchemy"), "coordinator --database c.sqlite3"),
    "doctor's helper": (("subprocess.Popen", ""), "doctor --state-dir state"),
    "validate's modules": (("import", "trio"), "validate"),
    "simgpu's modules": (("import", "leasehold_simgpu.host"), "simgpu show --dir here"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_leaves_no_traceback(moment: str) -> None:
    event, line = MOMENTS[moment]
    # A worker that is killed leaves files in TMPDIR, which its next start would delete.
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "client.token")  # without it, a verb would end before its interrupt
        token.write_text("t" * 32)
        token.chmod(0o600)
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, *event, *line.split()],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            env={
                **os.environ,
                "LEASEHOLD_COORDINATOR": "insecure:127.0.0.1:1",
                "LEASEHOLD_CREDENTIALS": folder,
                "TMPDIR": folder,
            },
        )
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{INTERRUPTED}"
    done = subprocess.run(
        [sys.executable, "-c", ignoring, "import", "click", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


FAILING = """
import threading
from leasehold_client.coordinator.connection import Connection
class HalfMade:
    def __del__(self):
        self.state
    __del__.__module__ = "grpc._channel"
def close(connection):
    thread = threading.Thread(target=int, args=["half made"])
    thread.start()
    thread.join()
    HalfMade()
Connection.close = close
from leasehold_client.__main__ import main
main()
"""
"""A call that a signal left half made lets a thread or a destructor of gRPC fail, rarely."""


def test_a_half_made_call_that_fails_leaves_no_traceback(scripted: ScriptedCoordinator) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING, "get", "workers"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LEASEHOLD_COORDINATOR": scripted.address},
    )
    assert done.returncode == 1, "the scripted coordinator has no workers to list"
    assert len(done.stderr.splitlines()) == 1, done.stderr


PRINTED = ["--help", "--version", "worker --help", "doctor --state-dir state"]


def run_printing(line: str, stdout: int, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leasehold_client", *line.split()],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd=folder,
    )


@pytest.mark.parametrize("line", PRINTED)
def test_what_click_prints_to_a_full_disk_is_one_line(line: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run_printing(line, full.fileno(), tmp_path)
    assert done.stderr == "leasehold: can't write the output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("line", PRINTED)
def test_what_click_prints_to_nobody_is_no_failure(line: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run_printing(line, writer, tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_that_nobody_can_be_told_keeps_its_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-m", "leasehold_client", "nothing"], stderr=full, timeout=60)
    assert done.returncode == 2


@pytest.mark.parametrize(
    "line", ["--help", "exec --gpus 0 -- true", pytest.param("get gpus", marks=pytest.mark.long)]
)
def test_a_closed_output_gives_no_traceback(line: str, tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m leasehold_client {line} >&-"
    environment = {**os.environ, "LEASEHOLD_COORDINATOR": "127.0.0.1:1", "LEASEHOLD_SOCKET": "none.sock"}
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert "Traceback" not in done.stderr


HOMELESS = """
import pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
from leasehold_client.__main__ import main
main()
"""
"""A user that the host does not know, as in a container, and without HOME."""


@pytest.mark.parametrize("line", ["worker", "coordinator", "doctor", "doctor --host", "backup create kept"])
def test_a_user_without_a_home_directory_gets_one_line(line: str, tmp_path: Path) -> None:
    homeless = ("HOME", "XDG_STATE_HOME")
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, *line.split()],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in homeless},
    )
    told = f"leasehold {line.split()[0]}: this user has no home directory: set HOME or XDG_STATE_HOME\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
