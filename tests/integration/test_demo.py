"""The demonstration, as ``make demo`` runs it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.prefork import COMMAND_LINE, ROOT, Forked, run


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--mutual-tls"]])
def test_the_demo_ends_well_and_leaves_nothing(tmp_path: Path, options: list[str]) -> None:
    done = run(COMMAND_LINE, ["demo", "--dir", str(tmp_path), *options], env=os.environ, timeout=90)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == {"counters": 6, "suspends": 2, "restores": 2, "remaps": 1, "lost": 0, "corrupt": 0}
    assert not processes_naming(str(tmp_path))
    again = run(COMMAND_LINE, ["demo", "--dir", str(tmp_path)], env=os.environ, timeout=30)
    assert again.returncode == 2
    assert "has the fleet of an earlier demonstration" in again.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    told = tmp_path / "told"
    with told.open("w") as output:
        demo = Forked(
            COMMAND_LINE,
            ["demo", "--dir", str(tmp_path / "demo")],
            stdout=output,
            stderr=output,
            env=os.environ,
        )
    try:
        while "run counter-3: " not in told.read_text():
            assert demo.poll() is None, told.read_text()
            time.sleep(0.01)
        second = run(COMMAND_LINE, ["demo", "--dir", str(tmp_path / "demo")], env=os.environ, timeout=30)
        assert second.returncode == 2
        assert "another demonstration uses the folder" in second.stderr
        demo.send_signal(number)
        assert demo.wait(60) == 130, told.read_text()
    finally:
        demo.kill()
    assert not processes_naming(str(tmp_path))


def test_the_makefile_keeps_the_fleet_of_the_demo() -> None:
    """tests/web plays the command."""
    done = subprocess.run(
        ["make", "-n", "demo", "KEEP=1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("/leasehold demo --keep\n")


def processes_naming(text: str) -> list[str]:
    """Command lines of the running processes that name something."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in command and "pytest" not in command:
            found.append(command)
    return found
