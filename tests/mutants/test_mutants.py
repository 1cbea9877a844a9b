"""A defect of the worker that puts two workloads on one GPU shows as corrupt bytes, and in no other way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from .mutations import Mutation

ROOT = Path(__file__).resolve().parents[2]


def play(mutation: Mutation, folder: Path) -> dict[str, Any]:
    host = SimulatedHost.create(folder / "host", gpus=3, timing=Timing.instant(), exclusive_memory=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.story", mutation],
        cwd=ROOT,
        env={**os.environ, **host.environment()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.long
def test_the_worker_as_it_is_corrupts_nothing(tmp_path: Path) -> None:
    assert play(Mutation.NONE, tmp_path) == {"corrupt": 0, "failure": ""}


@pytest.mark.long
@pytest.mark.parametrize("mutation", [mutation for mutation in Mutation if mutation is not Mutation.NONE])
def test_a_defect_corrupts_a_counter(mutation: Mutation, tmp_path: Path) -> None:
    assert play(mutation, tmp_path)["corrupt"] > 0
