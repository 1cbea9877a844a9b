"""Whether PyTorch processes survive a suspend and a restore with what they may hold: graphs, streams, NCCL.

Prints a JSON object for each of `contents_program.py`'s kinds of contents, as soon as its result is known.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.gpu.contents_program import CONTENTS, PROFILER
from tests.gpu.leftovers import end_safely
from tests.gpu.stand import LOCK_TIMEOUT_MS, NotTestedError, Stand, stand
from tests.gpu.steps import SKIPPED
from tests.gpu.torch_policies import PYTHONS, python_with_torch
from tests.simgpu.programs import RUNNING, SUCCESS, Program

CONTENTS_PROGRAM: Final = Path(__file__).with_name("contents_program.py")
START_S: Final = 40.0
ANSWER_S: Final = 15.0
ROUNDS: Final = 2
PARALLEL_PROGRAMS: Final = 3
"""Programs that run at once. The import of PyTorch takes most of a program's time."""

BUDGET_S: Final = 100.0
"""No further program is started after this time: a report has other steps."""

RESTORED: Final = "restored"


class Holder:
    """A running `contents_program.py`."""

    def __init__(self, python: str, name: str) -> None:
        self._process = subprocess.Popen(
            [python, str(CONTENTS_PROGRAM), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._process.pid

    def read(self, timeout_s: float) -> str:
        """Its next line. Empty: it has ended, or says nothing in time."""
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                return ""
            if not (read := os.read(self._process.stdout.fileno(), 1)):
                return ""
            line += read
        return line.decode().strip()

    def works(self) -> bool:
        """Whether its contents still work."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self.read(ANSWER_S) == "works"

    def end(self) -> None:
        """Ends it, after a suspend if it runs. It ends with its input too, if it can't be suspended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        end_safely([self.pid])
        self._process.wait(ANSWER_S)


def cycle(controller: Program, holder: Holder) -> str:
    """Suspends and restores a process once, and says what became of it."""
    for call in ("lock", "checkpoint", "restore", "unlock"):
        arguments = (LOCK_TIMEOUT_MS,) if call == "lock" else ()
        if (error := getattr(controller, call)(holder.pid, *arguments)) == SUCCESS:
            continue
        state = controller.get_state(holder.pid)[1]
        if state != RUNNING:
            controller.unlock(holder.pid)
        return f"{call} answers {error}, state {state}, {'works' if holder.works() else 'does not work'} then"
    return RESTORED if holder.works() else "does not work after its restore"


def result(made: Stand, python: str, name: str) -> str:
    """The result of one kind of contents."""
    controller = made.controller()
    holder = Holder(python, name)
    try:
        if holder.read(START_S) != "ready":
            return "not tested: the program does not start"
        for _ in range(ROUNDS):
            if (found := cycle(controller, holder)) != RESTORED:
                return found
        return RESTORED
    finally:
        holder.end()
        controller.close()


def results(python: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each kind of contents with its result, in their order."""
    end = time.monotonic() + BUDGET_S

    def result_in_time(name: str) -> str:
        return result(made, python, name) if time.monotonic() < end else "not tested: no time"

    with stand() as made, ThreadPoolExecutor(PARALLEL_PROGRAMS) as threads:
        yield from zip(names, threads.map(result_in_time, names), strict=True)


def is_expected(name: str, found: str) -> bool:
    """Whether a result is that of driver 580: all but a profiler is restored, and nothing is lost."""
    if found.startswith("not tested"):
        return True
    return found == ("lock answers 801, state 0, works then" if name == PROFILER else RESTORED)


def main() -> int:
    """Runs the command line."""
    python = python_with_torch()
    if python is None:
        print(f"no PyTorch that sees a GPU in any of {', '.join(PYTHONS)}")
        return SKIPPED
    all_expected = True
    try:
        for name, found in results(python, list(CONTENTS)):
            print(json.dumps({name: found}), flush=True)
            all_expected = all_expected and is_expected(name, found)
    except NotTestedError as error:
        print(error)
        return SKIPPED
    return 0 if all_expected else 1


if __name__ == "__main__":
    sys.exit(main())
