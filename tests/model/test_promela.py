"""The Promela model of docs/protocol, checked by spin, and mutations, in which spin must find an error."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "docs/protocol/commands.pml"
MUTATIONS = re.findall(r"MUTATION_\w+", (MODEL.parent / "commands.pml").read_text())

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("gcc")), reason="spin or gcc is not installed"
    ),
]


def check(folder: Path, *defines: str) -> tuple[int, int]:
    """The number of errors, and of the states that were looked at."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # spin writes the path into C, where it must be short.
    shutil.copy(MODEL, folder)
    run("spin", *(f"-D{define}" for define in defines), "-a", MODEL.name)
    run("gcc", "-O1", "-DSAFETY", "-o", "pan", "pan.c")
    report = run("./pan", "-m1000000")
    errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\d+) states, stored", report)
    assert errors, report
    assert states, report
    assert "max search depth too small" not in report
    return int(errors[1]), int(states[1])


@pytest.mark.minutes
def test_every_order_of_events_keeps_the_promises(tmp_path: Path) -> None:
    errors, states = check(tmp_path)
    assert errors == 0
    assert states > 1_000_000, "the model has lost its trouble"


@pytest.mark.parametrize("mutation", sorted(set(MUTATIONS)))
def test_a_rule_that_is_left_out_is_missed(tmp_path: Path, mutation: str) -> None:
    errors, _ = check(tmp_path, mutation)
    assert errors == 1
