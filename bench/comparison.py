"""Runs a benchmark on the code of an older commit and on the present code, in turn, and prints the ratios.

python -m bench.comparison a9aea06 -m bench.command_latency --rounds 300

The benchmark itself is the present one in both cases. Only the packages of the older commit run, from a
worktree in a temporary folder. Each figure is the median of the turns. A ratio is present to older.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("protos/gen", "worker", "coordinator", "client", "web", "simgpu")


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A temporary checkout of a commit."""
    with tempfile.TemporaryDirectory(prefix="leasehold-beside-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(tree: Path, arguments: list[str]) -> object:
    """The document that a benchmark prints about the packages of a checkout."""
    path = os.pathsep.join(str(tree / room) for room in ROOMS)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def figures(document: object, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a document, by its path."""
    match document:
        case dict():
            for key, value in document.items():
                yield from figures(value, f"{place}.{key}".lstrip("."))
        case list():
            for number, value in enumerate(document):
                yield from figures(value, f"{place}.{number}")
        case bool():
            pass
        case int() | float():
            yield place, document


def medians(documents: list[object]) -> dict[str, float]:
    """The median of each figure that is in all documents."""
    found = [dict(figures(document)) for document in documents]
    return {
        place: statistics.median(one[place] for one in found)
        for place in found[0]
        if all(place in one for one in found) and not place.startswith("machine")
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="of the older code")
    parser.add_argument("--turns", type=int, default=1, help="how often each side runs")
    parser.add_argument("benchmark", nargs=argparse.REMAINDER, help="as for python")
    options = parser.parse_args()
    before: list[object] = []
    now: list[object] = []
    with worktree(options.commit) as tree:
        for _ in range(options.turns):
            before.append(run(tree, options.benchmark))
            now.append(run(ROOT, options.benchmark))
    old, new = medians(before), medians(now)
    document = {
        "commit": options.commit,
        "turns": options.turns,
        "before": old,
        "now": new,
        "ratio": {place: round(new[place] / old[place], 2) for place in new if old.get(place)},
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
