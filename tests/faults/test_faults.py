"""A fixed sample of the fault suite. `make faults N=10000` plays all of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import QUERIES, STEPS, Kind, grid
from .runner import explored

ROOT = Path(__file__).resolve().parents[2]
CASES = 40
SEED = 2026
SEQUENCES = 30


@pytest.mark.parametrize("kind", list(Kind))
def test_every_operation_ends_whole_whatever_goes_wrong(kind: Kind) -> None:
    arguments = ["--kind", kind, "--cases", str(CASES), "--seed", str(SEED), "--processes", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.runner", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == []
    assert (result["cases"], result["left_locked"], result["corrupt"]) == (CASES, 0, 0)
    assert len(result["outcomes"]) > 2, "the sample has faults that do something"


def test_every_sequence_ends_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert explored(SEQUENCES)


def test_the_grid_has_every_call_of_every_operation_with_every_sort_of_fault() -> None:
    cases = grid()
    assert len(set(cases)) == len(cases)
    assert {(case.kind, case.fault.call) for case in cases} == {
        (kind, call) for kind in Kind for call in (*QUERIES, *STEPS)
    }
    for sort in ("error", "state", "hang", "crash", "skip", "keep_memory", "ignore_gpu_pairs", "delay_s"):
        assert any(getattr(case.fault, sort) for case in cases), sort
