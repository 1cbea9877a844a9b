"""One step of the report: a command with a deadline, in a process group of its own."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tests.gpu.leftovers import MARK, end_marked

SKIPPED: Final = 77
"""Exit status of a step that does not apply to this host. The last line of its output says why."""

TAIL_CHARACTERS: Final = 8000


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be run.

    Attributes:
        name: Of the step, unique in a report.
        command: With its arguments.
        deadline_s: How long it may take.
        least_s: It is not begun when less time is left: a transfer must not be ended in the middle.
        beside_others: Whether it may run beside its neighbours that may, too.
    """

    name: str
    command: Sequence[str]
    deadline_s: float
    least_s: float = 1.0
    beside_others: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        name: Of the step.
        result: `passed`, `failed`, `timed out`, `skipped` (it does not apply here), `not run` (no time was
            left) or `interrupted`.
        seconds: How long it took, without the ending of what it left.
        output: The end of its standard output and error.
        leftovers: A line for each process that it left, with what became of the process.
    """

    name: str
    result: str
    seconds: float = 0.0
    output: str = ""
    leftovers: Sequence[str] = ()

    def document(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


class Runner:
    """Runs steps, also in several threads. Every process of a step carries a mark in its environment.

    Args:
        mark: Begins the mark of every step.
        environment: Of the steps.
    """

    def __init__(self, mark: str, environment: Mapping[str, str]) -> None:
        self._mark = mark
        self._environment = environment
        self._interrupted = False
        self._numbers = itertools.count(1)

    @property
    def interrupted(self) -> bool:
        """Whether it was interrupted."""
        return self._interrupted

    def interrupt(self) -> None:
        """Ends the steps that run, and lets no other begin. For signal handlers."""
        self._interrupted = True

    def run(self, step: Step, time_left_s: float) -> StepResult:
        """Runs a step until its end, its deadline, or the end of the time that is left.

        At the deadline the processes of the step are ended as :mod:`tests.gpu.leftovers` says, the first one
        included.
        """
        if self._interrupted:
            return StepResult(step.name, "not run", output="the report was interrupted")
        if time_left_s < step.least_s:
            return StepResult(step.name, "not run", output=f"{max(0, time_left_s):.0f} s were left")
        mark = f"{self._mark}/{next(self._numbers)}/"
        limit_s = min(step.deadline_s, time_left_s)
        with tempfile.TemporaryFile() as output:
            began = time.monotonic()
            child = subprocess.Popen(
                step.command,
                env={**self._environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            ended = self._wait(child, began + limit_s)
            seconds = round(time.monotonic() - began, 2)
            leftovers = end_marked(mark)
            if not ended:
                child.poll()
            output.seek(max(0, os.fstat(output.fileno()).st_size - TAIL_CHARACTERS))
            tail = output.read().decode(errors="replace").strip()
        return StepResult(step.name, self._verdict(child, ended), seconds, tail, tuple(leftovers))

    def _wait(self, child: subprocess.Popen[bytes], deadline: float) -> bool:
        while time.monotonic() < deadline and not self._interrupted:
            try:
                child.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            return True
        return False

    def _verdict(self, child: subprocess.Popen[bytes], ended: bool) -> str:
        if not ended:
            return "interrupted" if self._interrupted else "timed out"
        return {0: "passed", SKIPPED: "skipped"}.get(child.returncode, "failed")
