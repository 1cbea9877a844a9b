"""Plays cases of the fault suite: `python -m tests.faults.runner`. Prints the counts as one JSON document.

More cases than the grid has are sequences that hypothesis makes up.

Exit status 0 if everything was as it was said to be, 1 if not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import trio
from leasehold_simgpu import SimulatedHost, Timing

from .arena import open_arena
from .cases import Case, Kind, grid, one_of_each, regressions, sample
from .playing import Tally, make_stages, play

GPUS: Final = 16
SHOWN_PROBLEMS: Final = 20


async def play_all(host: SimulatedHost, folder: Path, cases: list[Case]) -> Tally:
    """Plays cases, those of different stages at once."""
    tally = Tally()
    async with open_arena(host, folder) as arena:
        stages = make_stages([gpu.uuid for gpu in host.gpus])
        by_stage: dict[int, list[Case]] = {}
        for case in cases:
            by_stage.setdefault(id(stages[case.kind, case.size]), []).append(case)

        async def play_some(mine: list[Case]) -> None:
            for case in mine:
                await play(arena, stages[case.kind, case.size], case, tally)

        async with trio.open_nursery() as nursery:
            for mine in by_stage.values():
                nursery.start_soon(play_some, mine)
        await arena.end_all()
        if arena.host_memory.promised_bytes:
            tally.problems.append(f"{arena.host_memory.promised_bytes} bytes of host memory stay promised")
    return tally


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that the options name."""
    if options.regressions:
        return regressions()
    if options.one_of_each:
        return one_of_each(options.seed)[: options.cases]
    return sample(options.cases, options.seed, options.kind)


def play_here(options: argparse.Namespace) -> dict[str, Any]:
    """Plays this process's share, on the host that it was started with."""
    share = chosen(options)[options.share :: options.processes]
    host = SimulatedHost.open(os.environ["LEASEHOLD_SIMGPU_DIR"])
    with tempfile.TemporaryDirectory() as folder:
        tally = trio.run(play_all, host, Path(folder), share, strict_exception_groups=True)
    return {
        "cases": len(share),
        "outcomes": tally.outcomes,
        "done_once": tally.done_once,
        "left_locked": tally.left_locked,
        "corrupt": tally.corrupt,
        "problems": tally.problems,
    }


def play_in_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Plays all shares, each in a process with a simulated host of its own."""
    began = time.monotonic()
    arguments = ["--cases", str(options.cases), "--seed", str(options.seed)]
    arguments += ["--kind", options.kind] if options.kind else []
    arguments += ["--one-of-each"] if options.one_of_each else []
    arguments += ["--regressions"] if options.regressions else []
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for share in range(options.processes):
            host = SimulatedHost.create(
                Path(folder, str(share)), gpus=GPUS, timing=Timing.instant(), exclusive_memory=True
            )
            mine = ["--share", str(share), "--processes", str(options.processes)]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.faults.runner", *arguments, *mine],
                    env={**os.environ, **host.environment()},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for process in started:
            output, _ = process.communicate()
            results.append(json.loads(output or "{}"))
    if not all(results):
        raise SystemExit("some of the cases ended without a verdict: standard error says why")
    sequences = max(0, options.cases - len(grid())) if options.kind is None else 0
    problems = [problem for result in results for problem in result["problems"]]
    if sequences and not explored(sequences, options.seed):
        problems.append("a sequence ended in something else than was said: standard error shows it")
    outcomes = sum((Counter(result["outcomes"]) for result in results), Counter[str]())
    return {
        "cases": sum(result["cases"] for result in results),
        "sequences": sequences,
        "seed": options.seed,
        "outcomes": dict(outcomes.most_common()),
        "done_once": sum(result["done_once"] for result in results),
        "left_locked": sum(result["left_locked"] for result in results),
        "corrupt": sum(result["corrupt"] for result in results),
        "wrong_outcomes": len(problems),
        "problems": problems[:SHOWN_PROBLEMS],
        "duration_s": round(time.monotonic() - began, 1),
    }


def explored(sequences: int, seed: int) -> bool:
    """Has hypothesis make up sequences, half of them of each sort. False: one failed."""
    with tempfile.TemporaryDirectory() as folder:
        host = SimulatedHost.create(
            Path(folder, "host"), gpus=GPUS, timing=Timing.instant(), exclusive_memory=True
        )
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.faults.sequences"),
                *("--examples", str(max(1, sequences // 2)), "--seed", str(seed)),
            ],
            env={**os.environ, **host.environment()},
            check=False,
        )
    return done.returncode == 0


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=1, help="which, where it is not all")
    parser.add_argument("--kind", type=Kind, choices=list(Kind), help="only those of one operation")
    parser.add_argument("--one-of-each", action="store_true", help="at most one for each sort of fault")
    parser.add_argument("--regressions", action="store_true", help="only those that have failed before")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="to play them in")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        sys.stdout.write(json.dumps(play_here(options)))
        return
    result = play_in_processes(options)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
