"""A report keeps what it has: past a step that hangs, and past its own end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from . import leftovers
from .assumptions import PROBES
from .bootstrap import report_environment
from .leftovers import end_marked, marked
from .report import MACHINE, STEPS, run
from .steps import Runner, Step, StepResult
from .test_assumptions import can_be_tested

MOVE, PROFILER = 8, 22
"""The assumptions whose probes need two GPUs, and PyTorch."""

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
PASSES = Step("passes", ("true",), 30)
STANDS_STILL = Step("stands still", ("sh", "-c", "echo begun; sleep 600 & sleep 600"), 600)

INTERRUPTED = """
import sys, time
from pathlib import Path
from tests.gpu.report import run
from tests.gpu.test_report import PASSES, STANDS_STILL
run((PASSES, STANDS_STILL, PASSES), Path(sys.argv[1]), time.monotonic(), 600)
"""


def read(folder: Path) -> Any:
    """A report, finished or not."""
    return json.loads((folder / "gpu_report.json").read_text())


def wait_for(condition: Callable[[], bool]) -> None:
    """Polls until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def results(report: Any) -> list[str]:
    """The results of the steps."""
    return [step["result"] for step in report["steps"]]


def test_a_step_that_hangs_is_ended_at_its_deadline_and_the_rest_runs(mark: str, tmp_path: Path) -> None:
    hangs = Step("hangs", STANDS_STILL.command, 1.0)
    assert not run((PASSES, hangs, PASSES), tmp_path, time.monotonic(), 600)
    report = read(tmp_path)
    assert results(report) == ["passed", "timed out", "passed"]
    assert report["finished"]
    hung = report["steps"][1]
    assert hung["output"] == "begun"
    assert [line.rpartition(": ")[2] for line in hung["leftovers"]] == ["killed"] * 3
    assert marked(mark + "/") == []


def test_neighbours_that_may_run_at_once_do_and_no_other_step_runs_beside_them(
    mark: str, tmp_path: Path
) -> None:
    meet = "touch {0}; until [ -e {1} ]; do sleep 0.05; done; sleep 0.2; rm {0}"
    steps = [
        Step(name, ("sh", "-c", f"cd {tmp_path}; " + meet.format(name, other)), 60, beside_others=True)
        for name, other in (("first", "second"), ("second", "first"))
    ]
    alone = Step("alone", ("sh", "-c", f"cd {tmp_path}; ! ls first second"), 60)
    assert run((*steps, alone, PASSES), tmp_path, time.monotonic(), 600)
    *both, third, fourth = [step["name"] for step in read(tmp_path)["steps"]]
    assert (set(both), third, fourth) == ({"first", "second"}, "alone", "passes")


def test_a_result_is_written_before_its_slower_neighbours_end(mark: str, tmp_path: Path) -> None:
    meanwhile = f"until grep -q 'quick.*passed' {tmp_path}/gpu_report.md; do sleep 0.05; done"
    slow = Step("slow", ("sh", "-c", meanwhile), 60, beside_others=True)
    quick = Step("quick", ("true",), 60, beside_others=True)
    assert run((slow, quick), tmp_path, time.monotonic(), 600)


def test_what_a_step_leaves_running_is_ended_and_named(mark: str, tmp_path: Path) -> None:
    leaves = Step("leaves", ("sh", "-c", "setsid sleep 600 & exit 0"), 30)
    run((leaves,), tmp_path, time.monotonic(), 600)
    (step,) = read(tmp_path)["steps"]
    assert step["result"] == "passed"
    (line,) = step["leftovers"]
    assert "sleep 600" in line
    assert line.endswith(": killed")


def test_a_process_that_one_scan_misses_is_ended(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = iter([True])
    scan = leftovers.marked
    monkeypatch.setattr(leftovers, "marked", lambda wanted: [] if next(first, False) else scan(wanted))
    with subprocess.Popen(["sleep", "600"], env={**os.environ, leftovers.MARK: f"{mark}/step"}) as missed:
        try:
            (line,) = end_marked(mark)
        finally:
            missed.kill()
    assert line.startswith(f"sleep 600 ({missed.pid})")


def test_a_report_reads_no_settings_of_the_host(tmp_path: Path) -> None:
    environment = report_environment(tmp_path, "a mark")
    for name in ("LEASEHOLD_COORDINATOR_CONFIG", "LEASEHOLD_WORKER_CONFIG"):
        assert Path(environment[name]).read_text() == ""
        assert tmp_path in Path(environment[name]).parents


def test_no_step_begins_when_the_time_is_up(mark: str, tmp_path: Path) -> None:
    run((PASSES,), tmp_path, time.monotonic() - 590, 600)
    assert results(read(tmp_path)) == ["not run"]


@pytest.fixture
def interrupted(mark: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A report in the middle of its second step."""
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path)], cwd=ROOT)
    try:
        wait_for(lambda: (tmp_path / "gpu_report.json").exists() and results(read(tmp_path)) == ["passed"])
        wait_for(lambda: len(marked(mark + "/")) == 3)
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.mark.long
def test_a_kill_in_the_middle_leaves_a_readable_report(
    interrupted: subprocess.Popen[bytes], mark: str, tmp_path: Path
) -> None:
    interrupted.kill()
    interrupted.wait()
    report = read(tmp_path)
    assert not report["finished"]
    assert results(report) == ["passed"]
    assert "The report is not finished" in (tmp_path / "gpu_report.md").read_text()
    assert len(end_marked(mark + "/")) == 3  # as the kit's bootstrap ends them


@pytest.mark.long
def test_sigterm_ends_the_step_and_the_report(
    interrupted: subprocess.Popen[bytes], mark: str, tmp_path: Path
) -> None:
    interrupted.send_signal(signal.SIGTERM)
    interrupted.wait(DEADLINE_S)
    report = read(tmp_path)
    assert not report["finished"]
    assert results(report) == ["passed", "interrupted", "not run"]
    assert marked(mark + "/") == []


def test_a_step_that_does_not_apply_is_skipped(mark: str) -> None:
    step = Step("skips", ("sh", "-c", "echo why; exit 77"), 30)
    found = Runner(mark, os.environ).run(step, 60)
    assert found == StepResult("skips", "skipped", found.seconds, "why")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpus", [1, 2])
def test_all_steps_on_a_simulated_host(
    gpus: int, host: SimulatedHost, on_host: dict[str, str], tmp_path: Path
) -> None:
    if gpus == 1:
        memory_bytes = host.gpus[0].memory_bytes
        one = SimulatedHost.create(
            tmp_path / "one", gpus=1, memory_bytes=memory_bytes, timing=Timing.typical()
        )
        on_host.update(one.environment())
    host.set_timing(Timing.typical())
    began = str(time.monotonic())
    command = [sys.executable, "-m", "tests.gpu.report", "--output", str(tmp_path), "--began", began]
    done = subprocess.run([*command, "--budget-s", "540"], cwd=ROOT, env=on_host, timeout=590, check=False)
    report = read(tmp_path)
    assert report["machine"]["simulated"]
    assert len(report["machine"]["gpus"]) == gpus
    found = {step["name"]: step["result"] for step in report["steps"]}
    assert found == {
        step.name: "skipped" if "PyTorch" in step.name else "passed" for step in STEPS if step != MACHINE
    }
    assert done.returncode == 0
    assert report["finished"]
    assert [step["leftovers"] for step in report["steps"]] == [[]] * len(STEPS)
    answers = {number: each["answer"] for number, each in report["assumptions"].items()}
    not_here = {MOVE, PROFILER} if gpus == 1 else {PROFILER}
    expected = {
        str(number): "yes" if can_be_tested(number) and number not in not_here else "not tested"
        for number in PROBES
    }
    assert {number: answers[number] for number in expected} == expected
    assert "for this table" in (tmp_path / "gpu_report.md").read_text()
