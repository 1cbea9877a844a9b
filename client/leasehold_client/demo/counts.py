"""Analysis of a counter's output. Pure."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_LINE: Final = re.compile(r"^count=(\d+) gpu=(GPU-\S+) ok$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CounterReport:
    """Figures of one counter's output.

    Attributes:
        counts: Number of counts.
        lost: Counts that are missing or out of order.
        corrupt: Lines that report a wrong byte or an error.
        gpu_uuids: The GPUs that the counter ran on, in order.
    """

    counts: int
    lost: int
    corrupt: int
    gpu_uuids: tuple[str, ...]


def read_counter(text: str) -> CounterReport:
    """Reads the whole output of a counter. An incomplete last line is ignored."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    found = [match for line in lines if (match := _LINE.match(line))]
    numbers = [int(match[1]) for match in found]
    gpu_uuids = [match[2] for match in found]
    return CounterReport(
        counts=len(numbers),
        lost=sum(after != before + 1 for before, after in pairwise(numbers)),
        corrupt=len(lines) - len(found),
        gpu_uuids=tuple(
            uuid for index, uuid in enumerate(gpu_uuids) if index == 0 or uuid != gpu_uuids[index - 1]
        ),
    )
