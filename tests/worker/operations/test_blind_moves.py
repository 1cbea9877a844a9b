"""A worker that can't look at what it has moved, for lack of threads or descriptors, gives away no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost, Timing


@pytest.mark.parametrize(
    ("scenario", "held"), [("restore", "first"), ("libraries", "second"), ("remap", "second")]
)
def test_a_workload_that_was_moved_keeps_its_new_gpu(tmp_path: Path, scenario: str, held: str) -> None:
    """Another claim waits for the GPU, and was granted it, with the workload running there."""
    assert play(tmp_path, scenario) == {"state": "RUNNING", "held": [held], "granted": [], "told": ""}


def test_a_restore_that_does_not_begin_leaves_the_workload_suspended(tmp_path: Path) -> None:
    found = play(tmp_path, "order")
    assert (found["state"], found["held"]) == ("SUSPENDED", [])
    assert "too many open files" in str(found["told"])


def play(tmp_path: Path, scenario: str) -> dict[str, object]:
    host = SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.operations.blind_moves", str(tmp_path / "state"), scenario],
        env={**os.environ, **host.environment()},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found
