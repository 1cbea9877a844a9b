"""The demonstration, as ``make demo`` runs it."""

import json
import signal
import subprocess
from pathlib import Path

from .fleets import LEASEHOLD


def test_the_demo_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LEASEHOLD, "demo", "--dir", str(tmp_path)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == {"counters": 6, "suspends": 2, "restores": 2, "remaps": 1, "lost": 0, "corrupt": 0}
    assert not processes_naming(str(tmp_path))


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*LEASEHOLD, "demo", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stderr is not None
        while "counter-3" not in demo.stderr.readline():
            assert demo.poll() is None
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert not processes_naming(str(tmp_path))


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
