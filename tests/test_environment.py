"""The end of a run reports what tests left, and its environment is that of no machine."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import environment


def test_a_process_and_a_file_that_are_left_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "LEFTOVER_TIMEOUT_S", 0.1)
    (tmp_path / "t").mkdir()
    assert environment.leftovers(tmp_path) == []
    (tmp_path / "t/forgotten").touch()
    marked = {**os.environ, environment.MARK: str(tmp_path)}
    ready = "print(flush=True); import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", ready], env=marked, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        program, file = environment.leftovers(tmp_path)
        process.kill()
    assert program.startswith(f"process {process.pid}: ")
    assert file == f"file {tmp_path / 't/forgotten'}"


def test_what_somebody_installed_or_set_is_not_seen(tmp_path: Path) -> None:
    """Runs pytest as a shell with odd settings would, and has it print what a test sees."""
    (tmp_path / "criu").touch(mode=0o755)
    odd = {
        **{name: value for name, value in os.environ.items() if name != environment.MARK},
        "HOME": "/nonexistent",
        "LEASEHOLD_COORDINATOR": "203.0.113.1:1",
        "LEASEHOLD_STATE_DIR": "/nonexistent",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    seen = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            "-n0",
            f"{__file__}::test_print_what_is_seen",
            "-m",
            "long",
        ],
        env=odd,
        cwd=environment.ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ).stdout
    assert "None None None False True" in seen, seen


@pytest.mark.long
def test_print_what_is_seen() -> None:
    """Is run by the test before it."""
    print(
        shutil.which("criu"),
        os.environ.get("LEASEHOLD_COORDINATOR"),
        os.environ.get("LEASEHOLD_STATE_DIR"),
        os.environ["HOME"] == "/nonexistent",
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    )
