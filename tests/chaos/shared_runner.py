"""Lets all kinds of holders share one host, at random, and compares everything after each step. Prints JSON.

python -m tests.chaos.shared_runner --steps 1000 --seed 1
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from leasehold_client.coordinator.client import Client

from .agreement import wait_agreed
from .shared_host import SharedHost, shared_host
from .shared_steps import STEPS

LOG_EXCERPT = 2_000
"""Characters of a log that are told before and after a traceback."""

SLOWEST_S: dict[str, float] = {}
"""By step: the longest that it took until all agreed again."""


def play(shared: SharedHost, client: Client, steps: int, seed: int, taken: Counter[str]) -> None:
    """Takes so many steps, and compares after each.

    Args:
        shared: The host.
        client: A client of its coordinator.
        steps: How many.
        seed: Repeats the same ones.
        taken: Counts them.

    Raises:
        AssertionError: Something does not fit together.
    """
    chance = random.Random(seed)
    wait_agreed(shared, client)
    while taken.total() < steps:
        (step,) = chance.choices([step for step, _ in STEPS], [weight for _, weight in STEPS])
        if not step(shared, client, chance):
            continue
        taken[step.__name__] += 1
        began = time.monotonic()
        try:
            wait_agreed(shared, client)
        except AssertionError as error:
            raise AssertionError(f"after step {taken.total()}, {step.__name__}: {error}") from error
        SLOWEST_S[step.__name__] = max(SLOWEST_S.get(step.__name__, 0.0), time.monotonic() - began)
    for name in ("worker", "coordinator"):
        before, found, after = (shared.folder / f"{name}.log").read_text().partition("Traceback")
        if found:
            raise AssertionError(
                f"the log of the {name} has a traceback: {before[-LOG_EXCERPT:]}{found}{after[:LOG_EXCERPT]}"
            )


def main() -> int:
    """Plays, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the logs, which is kept")
    options = parser.parse_args()
    began = time.monotonic()
    problem = ""
    taken: Counter[str] = Counter()
    two_users = False
    with tempfile.TemporaryDirectory(prefix="leasehold-shared-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with shared_host(folder) as (shared, client):
            two_users = shared.two_users
            try:
                play(shared, client, options.steps, options.seed, taken)
            except AssertionError as error:
                problem = str(error)
    result = {
        "steps": taken.total(),
        "taken": dict(sorted(taken.items())),
        "seed": options.seed,
        "two_users": two_users,
        "slowest_agreement_s": {name: round(slow_s, 2) for name, slow_s in sorted(SLOWEST_S.items())},
        "problem": problem,
        "duration_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result, indent=2))
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
