"""Cases of the grid in which the worker is known to go wrong. Each is a defect that is to be mended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import known_defects

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.xfail(
    strict=True,
    reason="the restore of an UNKNOWN workload puts parked members on GPUs that it does not lease",
)
def test_a_swap_whose_gpu_is_lost_while_one_of_two_members_is_restored() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.runner", "--known-defects", "--processes", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    result = json.loads(done.stdout)
    assert result["cases"] == len(known_defects())
    assert result["problems"] == []
