"""The demonstration, run for real: that it finds what is wrong, and ends. How it ends well is tested on the
whole system, in tests/integration."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.conftest import CommandLine

LEASEHOLD = [sys.executable, "-m", "leasehold_client"]
FORGETFUL = """
import builtins, runpy, sys
said = builtins.print
def forget(line, **options):
    if not line.startswith("count=2 "):
        said(line, **options)
builtins.print = forget
sys.argv[0] = {counter!r}
runpy.run_path({counter!r}, run_name="__main__")
"""
COUNTER = Path(__file__).resolve().parents[3] / "examples/counter.py"


def run_demo(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs it with a mark, by which what it leaves behind would be found."""
    environment = {**os.environ, "DEMO_OF_TEST": str(tmp_path)}
    done = subprocess.run(
        [*LEASEHOLD, "demo", *arguments], capture_output=True, text=True, timeout=60, env=environment
    )
    assert not processes_with(f"DEMO_OF_TEST={tmp_path}")
    assert "Traceback" not in done.stderr
    return done


def processes_with(variable: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.long
def test_a_counter_that_loses_a_count_fails_the_demo(tmp_path: Path) -> None:
    counter = tmp_path / "forgetful.py"
    counter.write_text(FORGETFUL.format(counter=str(COUNTER)))
    done = run_demo("--counter", str(counter), tmp_path=tmp_path)
    summary = {"counters": 6, "suspends": 2, "restores": 2, "remaps": 1, "lost": 6, "corrupt": 0}
    assert json.loads(done.stdout) == summary, done.stderr
    assert done.stdout.count("\n") == 1
    assert done.returncode == 1
    assert "pair beta/0 " in done.stderr
    assert "takes over" in done.stderr


@pytest.mark.long
def test_a_counter_that_dies_fails_the_demo_with_the_logs(tmp_path: Path) -> None:
    counter = tmp_path / "dying.py"
    counter.write_text("print('count=0 gpu=GPU-none ok', flush=True)\nraise SystemExit(3)\n")
    done = run_demo("--counter", str(counter), tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--- coordinator.log" in done.stderr
    assert "--- alpha.log" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("leasehold: counter-1 ended")


def test_what_the_demo_needs_is_checked_first(bare_leasehold: CommandLine, tmp_path: Path) -> None:
    done = bare_leasehold("demo", "--counter", str(tmp_path / "nothing.py"))
    assert done.code == 2
    assert "nothing.py' does not exist" in done.stderr
    (tmp_path / "file").touch()
    done = bare_leasehold("demo", "--dir", str(tmp_path / "file/folder"))
    assert done.code == 2
    assert "can't be used" in done.stderr


def test_a_folder_of_an_earlier_demo_is_refused(bare_leasehold: CommandLine, tmp_path: Path) -> None:
    """Its workers were of other simulated GPUs, and would be refused after 30 s."""
    (tmp_path / "demonstration").touch()
    done = bare_leasehold("demo", "--dir", str(tmp_path))
    assert (done.code, done.stdout) == (2, "")
    assert "has the fleet of an earlier demonstration, whose GPUs are gone" in done.stderr


def test_the_state_directory_of_a_coordinator_is_no_earlier_demo(
    bare_leasehold: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "coordinator.sqlite3").touch()
    done = bare_leasehold("demo", "--dir", str(tmp_path))
    assert (done.code, done.stdout) == (2, "")
    assert f"the folder {tmp_path} has other files: name a new or an empty folder" in done.stderr


def test_a_folder_with_other_files_is_left_as_it_is(bare_leasehold: CommandLine, tmp_path: Path) -> None:
    """The coordinator would close the folder to other users, and put keys into it."""
    (tmp_path / "notes").touch()
    tmp_path.chmod(0o755)
    done = bare_leasehold("demo", "--dir", str(tmp_path))
    assert (done.code, done.stdout) == (2, "")
    assert f"the folder {tmp_path} has other files: name a new or an empty folder" in done.stderr
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
