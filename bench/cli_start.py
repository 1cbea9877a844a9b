"""Times the ``leasehold`` command: help, version, completion, and verbs that call a coordinator once.

Each round runs each command line once, in turn with ``python -c pass``, the minimum of a Python program. The
CPU time of a process depends less on other programs than its wall time. With --before, each round also runs
the same command lines in another checkout, where `make .venv/.installed` has installed the program. Prints
one JSON document.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.fleet.processes import Coordinator
from bench.machine import machine

PROGRAM: Final = Path(sys.executable).with_name("leasehold")
BARE: Final = "python -c pass"
LINES: Final = (
    "--version",
    "--help",
    "get --help",
    "run --help",
    "exec --help",
    "coordinator --help",
    "worker --help",
    "get workers",
    "get workloads",
    "get commands -o json",
)
COMPLETED: Final = ("", "w", "get w", "run --", "stop ", "get gpus a")
"""Command lines to complete. Names come from the file that the first round has written."""


class Sample(NamedTuple):
    """One run of a process, in milliseconds."""

    wall_ms: float
    cpu_ms: float


class Runner(NamedTuple):
    """A process that is timed."""

    arguments: Sequence[str]
    variables: Mapping[str, str]

    def run(self) -> Sample:
        """Runs the process to its end.

        Raises:
            SystemExit: The process failed.
        """
        began = time.perf_counter()
        started = subprocess.Popen(self.arguments, stdout=subprocess.DEVNULL, env=self.variables)
        _, status, usage = os.wait4(started.pid, 0)
        wall_s = time.perf_counter() - began
        started.returncode = os.waitstatus_to_exitcode(status)
        if started.returncode:
            raise SystemExit(f"{' '.join(self.arguments)} exited with {started.returncode}")
        return Sample(wall_s * 1000, (usage.ru_utime + usage.ru_stime) * 1000)


def runners(program: Path, variables: Mapping[str, str]) -> dict[str, Runner]:
    """The processes to time of one program, by their names in the report."""
    lines = {f"leasehold {line}": Runner([str(program), *line.split()], variables) for line in LINES}
    for text in COMPLETED:
        words = f"leasehold {text}"
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        completing = {**variables, **asked, "_LEASEHOLD_COMPLETE": "bash_complete"}
        lines[f"completion of `{words}`"] = Runner([str(program)], completing)
    return lines


def figures(samples: Sequence[Sample], bare: Sequence[Sample]) -> dict[str, float]:
    """The reported figures: medians, minimum, and the ratio to Python alone."""
    wall_ms, cpu_ms = [one.wall_ms for one in samples], [one.cpu_ms for one in samples]
    return {
        "wall_median_ms": round(statistics.median(wall_ms), 1),
        "wall_least_ms": round(min(wall_ms), 1),
        "cpu_median_ms": round(statistics.median(cpu_ms), 1),
        "cpu_least_ms": round(min(cpu_ms), 1),
        "cpu_ratio": round(statistics.median(cpu_ms) / statistics.median(one.cpu_ms for one in bare), 1),
    }


def measure(rounds: int, before: Path | None) -> dict[str, object]:
    """Runs everything in turn. The first round only writes bytecode, and does not count."""
    programs = {"now": PROGRAM}
    if before is not None:
        programs["before"] = before / ".venv/bin/leasehold"
    with tempfile.TemporaryDirectory() as folder, Coordinator(Path(folder)) as coordinator:
        variables = {**os.environ, "LEASEHOLD_COORDINATOR": coordinator.address, "XDG_CACHE_HOME": folder}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        timed = {
            (name, when): runner
            for when, program in programs.items()
            for name, runner in runners(program, variables).items()
        }
        timed[BARE, "now"] = Runner([sys.executable, "-c", "pass"], variables)
        samples: dict[tuple[str, str], list[Sample]] = {key: [] for key in timed}
        for number in range(rounds + 1):
            for key in sorted(timed):
                sample = timed[key].run()
                if number:
                    samples[key].append(sample)
    bare = samples[BARE, "now"]
    report: dict[str, dict[str, object]] = {name: {} for name, _ in timed}
    for (name, when), found in samples.items():
        report[name][when] = figures(found, bare)
    return {
        "benchmark": "cli_start",
        "rounds": rounds,
        "commands": report,
        "machine": {
            **machine("grpcio"),
            "load_average": [round(load, 1) for load in os.getloadavg()],
        },
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each command line")
    parser.add_argument("--before", type=Path, help="a checkout with older code and its .venv")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(measure(options.rounds, options.before), indent=2) + "\n")


if __name__ == "__main__":
    main()
