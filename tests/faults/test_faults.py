"""A sample of the fault suite. `make faults N=12000` plays all of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.environment import seed

from .cases import QUERIES, STEPS, Condition, Kind, grid, one_of_each, regressions
from .runner import explored

ROOT = Path(__file__).resolve().parents[2]
CASES = 150
SEQUENCES = 50


def played(*arguments: str, timeout_s: float) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.runner", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    print(done.stdout)
    assert result["problems"] == []
    assert (result["left_locked"], result["corrupt"]) == (0, 0)
    return result


@pytest.mark.long
def test_cases_that_have_failed_before_end_whole() -> None:
    assert played("--regressions", "--processes", "1", timeout_s=100)["cases"] == len(regressions())


@pytest.mark.long
def test_every_operation_ends_whole_with_each_sort_of_fault_of_each_call() -> None:
    result = played("--one-of-each", "--seed", str(seed()), timeout_s=200)
    assert result["cases"] == len(one_of_each(seed()))
    assert result["done_once"] > 0
    assert len(result["outcomes"]) > 4, "the sample has faults that do something"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_operation_ends_whole_in_a_sample_that_changes_each_day() -> None:
    arguments = ["--cases", str(CASES), "--seed", str(seed())]
    assert played(*arguments, timeout_s=800)["cases"] == CASES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_sequence_ends_whole_in_a_sample_that_changes_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    print(f"seed {seed()}")
    assert explored(SEQUENCES, seed())


def test_the_grid_has_every_call_of_every_operation_with_every_sort_of_fault() -> None:
    cases = grid()
    assert len(set(cases)) == len(cases)
    assert {(case.kind, case.fault.call) for case in cases} == {
        (kind, call) for kind in Kind for call in ("", *QUERIES, *STEPS)
    }
    assert {case.fault.condition for case in cases} == {None, *Condition}
    for sort in ("error", "state", "hang", "crash", "skip", "keep_memory", "ignore_gpu_pairs", "delay_s"):
        assert any(getattr(case.fault, sort) for case in cases), sort
