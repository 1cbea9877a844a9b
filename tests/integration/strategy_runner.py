"""Plays the grid of what goes wrong with policies: `python -m tests.integration.strategy_runner`.

Prints the counts as one JSON document. Exit status 0 if every case was played and left its workload as before
or as asked, 2 if there was none.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from .fleets import make_fleet
from .strategy_arena import NOT_PLAYED, Arena, play_all
from .strategy_cases import grid, sample

SHOWN_PROBLEMS = 40


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Let things go wrong while workloads are parked and woken.")
    parser.add_argument("--cases", type=int, help="how many, in the order of the seed (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", default="", help="only cases with this text")
    parser.add_argument("--without-images", action="store_true", help="no criu is no failure")
    options = parser.parse_args()
    cases = [case for case in sample(len(grid()), options.seed) if options.match in str(case)]
    cases = cases[: options.cases]
    if not cases:
        parser.error(f"no case has the text {options.match!r}: they are like 'checkpoint up: kill'")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, make_fleet(Path(folder)) as fleet:
        arena = Arena(fleet)
        tally = play_all(arena, cases)
        told = {
            "cases": len(cases),
            "grid": len(grid()),
            "seed": options.seed,
            "no_images": arena.why_no_images(),
            "seconds": round(time.monotonic() - began, 1),
            "outcomes": dict(tally.outcomes.most_common()),
            "problems": tally.problems[:SHOWN_PROBLEMS],
        }
        print(json.dumps(told, indent=2), flush=True)
        arena.stop()
    unplayed = bool(tally.outcomes[NOT_PLAYED]) and not options.without_images
    return 1 if tally.problems or unplayed else 0


if __name__ == "__main__":
    sys.exit(main())
