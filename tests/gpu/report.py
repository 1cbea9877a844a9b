"""Runs the steps of a report on this host's GPUs, and writes what was found after each.

The gpu_report of a kit runs it (`make gpu-kit`). It needs Linux, the project's packages, and a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from tests.gpu.assumptions import ALONE, PROBES
from tests.gpu.leftovers import MARK
from tests.gpu.page import page
from tests.gpu.steps import Runner, Step, StepResult

PYTHON: Final = sys.executable
LEASEHOLD: Final = (PYTHON, "-m", "leasehold_client")
CONFORMANCE: Final = (PYTHON, "-m", "tests.gpu.conformance")
BENCHMARK: Final = (PYTHON, "-m", "bench.operation_overhead")
OVERHEAD: Final = (*BENCHMARK, "--gpu", "--only-sizes", "--rounds", "1", "--gib")

MACHINE: Final = Step("machine", (PYTHON, "-m", "tests.gpu.machine"), 30)
ASSUMPTION: Final = "assumption "
ASSUMPTION_S: Final = 45.0
"""A call of a probe may take 30 s. The probe itself tells of it."""

STEPS: Final = (
    Step("doctor", (*LEASEHOLD, "doctor"), 40),
    *(
        Step(
            f"{ASSUMPTION}{number}",
            (PYTHON, "-m", "tests.gpu.assumptions", str(number)),
            ASSUMPTION_S,
            beside_others=number not in ALONE,
        )
        for number in PROBES
    ),
    Step("conformance", (*CONFORMANCE, "test_worker"), 100),
    Step("scenarios of NVIDIA", (*CONFORMANCE, "test_cuda_core or test_nvidia_samples"), 120),
    Step("validate", (*LEASEHOLD, "validate"), 60),
    Step("counters", (PYTHON, "-m", "tests.gpu.counters"), 120),
    Step("overhead, 1 GiB", (*OVERHEAD, "1"), 60),
    Step("overhead, 8 GiB", (*OVERHEAD, "8"), 60, least_s=40),
    Step("strategies with PyTorch", (PYTHON, "-m", "tests.gpu.torch_policies"), 90),
    Step("overhead, 32 GiB", (*OVERHEAD, "32"), 150, least_s=110),
    Step("contents with PyTorch", (PYTHON, "-m", "tests.gpu.torch_contents"), 150, least_s=30),
)
"""The most informative steps come first: the time of the last ones may be up."""

PARALLEL_STEPS: Final = 3
"""Steps that run at once, of those that may. Probes mostly wait for the driver and the start of processes."""

RESERVE_S: Final = 25.0
"""Kept at the end, for processes that a step left."""


class Report:
    """What was found so far, in two files that are replaced after each step.

    Args:
        folder: Where the files are written.
        began: When the report began, by the monotonic clock.
    """

    def __init__(self, folder: Path, began: float) -> None:
        self._folder = folder
        self._began = began
        self._machine: dict[str, Any] = {}
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._steps: list[StepResult] = []
        self.finished = False

    @property
    def well(self) -> bool:
        """Whether no step failed and no process was left."""
        return all(
            step.result in ("passed", "skipped") and not any("LEFT" in line for line in step.leftovers)
            for step in self._steps
        )

    def add(self, result: StepResult) -> None:
        """Adds a step, and writes both files."""
        if result.name == MACHINE.name and result.result == "passed":
            self._machine = _last_object(result.output)
        else:
            self._steps.append(result)
        self.write()

    def write(self) -> None:
        """Replaces both files, so that a reader never sees half of one."""
        document = {
            "date": self._date,
            "finished": self.finished,
            "seconds": round(time.monotonic() - self._began, 1),
            "machine": self._machine,
            "assumptions": {
                step.name.removeprefix(ASSUMPTION): _answer(step)
                for step in sorted(self._steps, key=lambda step: (len(step.name), step.name))
                if step.name.startswith(ASSUMPTION)
            },
            "steps": [step.document() for step in self._steps],
        }
        for name, text in (("json", json.dumps(document, indent=2) + "\n"), ("md", page(document))):
            fresh = self._folder / f".gpu_report.{name}.new"
            fresh.write_text(text)
            os.replace(fresh, self._folder / f"gpu_report.{name}")


def _last_object(output: str) -> dict[str, Any]:
    """The JSON object in the last line of an output. Empty: there is none."""
    try:
        found = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _answer(step: StepResult) -> dict[str, str]:
    """What a step found out about its assumption."""
    found = _last_object(step.output)
    if step.result == "passed" and found.keys() == {"answer", "seen"}:
        return found
    last = step.output.splitlines()[-1] if step.output else ""
    return {"answer": "not tested", "seen": f"the probe {step.result} after {step.seconds:g} s: {last}"}


def run(steps: Sequence[Step], folder: Path, began: float, budget_s: float) -> bool:
    """Runs steps until the budget is spent. SIGTERM and SIGINT end the step that runs, and the report.

    Args:
        steps: In their order.
        folder: Where the report is written.
        began: When the report began, by the monotonic clock.
        budget_s: What it may take in all, from then on.

    Returns:
        Whether nothing failed and nothing was left.
    """
    runner = Runner(os.environ[MARK], os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: runner.interrupt())
    report = Report(folder, began)
    report.write()

    def run_step(step: Step) -> StepResult:
        return runner.run(step, began + budget_s - RESERVE_S - time.monotonic())

    with ThreadPoolExecutor(PARALLEL_STEPS) as threads:
        for beside_others, neighbours in itertools.groupby(steps, lambda step: step.beside_others):
            if beside_others:
                begun = [threads.submit(run_step, step) for step in neighbours]
                results: Iterable[StepResult] = (one.result() for one in as_completed(begun))
            else:
                results = map(run_step, neighbours)
            for result in results:
                print(f"gpu_report: {result.name}: {result.result}, {result.seconds:.1f} s", flush=True)
                report.add(result)
    report.finished = not runner.interrupted
    report.write()
    print(f"gpu_report: {folder / 'gpu_report.json'} and gpu_report.md", flush=True)
    return report.well


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--began", type=float, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    options = parser.parse_args()
    return 0 if run((MACHINE, *STEPS), options.output, options.began, options.budget_s) else 1


if __name__ == "__main__":
    sys.exit(main())
