"""How long moving device memory takes: planned at first, then learned from what was measured.

A transfer is a fixed time and a rate, per GPU model and direction. Small transfers tell the fixed time,
large ones the rate. What was learned lives as long as the agent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from leasehold_worker.checkpoint.helper_protocol import DriverCall

PLANNED: Final = {DriverCall.CHECKPOINT: (0.4, 2e9), DriverCall.RESTORE: (0.5, 4e9)}
"""Fixed seconds and bytes per second that were seen on data-centre GPUs, the slow end of them."""

LARGE_BYTES: Final = 2**28
"""From here on the rate makes up most of the time."""

LEAST_RATE: Final = 1e8
MOST_RATE: Final = 1e12
LEAST_FIXED_S: Final = 0.05
NEWEST_WEIGHT: Final = 0.3
DEADLINE_FACTOR: Final = 3.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time, and for people how it was found."""

    duration_s: float
    basis: str


@dataclass(slots=True)
class _Learned:
    fixed_s: float
    bytes_per_s: float
    samples: int = 0


@final
class Rates:
    """What this host's GPUs were seen to do."""

    def __init__(self) -> None:
        self._learned: dict[tuple[str, DriverCall], _Learned] = {}

    def learn(self, chip: str, call: DriverCall, moved_bytes: int, duration_s: float) -> None:
        """Takes in one transfer that succeeded."""
        learned = self._learned.setdefault((chip, call), _Learned(*PLANNED[call]))
        if moved_bytes < LARGE_BYTES:
            learned.fixed_s = max(LEAST_FIXED_S, _mixed(learned, learned.fixed_s, duration_s))
        else:
            rate = moved_bytes / max(duration_s - learned.fixed_s, duration_s / 10)
            known = _mixed(learned, learned.bytes_per_s, rate)
            learned.bytes_per_s = min(max(LEAST_RATE, known), MOST_RATE)
        learned.samples += 1

    def transfer_s(self, chip: str, call: DriverCall, moved_bytes: int) -> float:
        """How long a transfer is expected to take."""
        learned = self._learned.get((chip, call)) or _Learned(*PLANNED[call])
        return learned.fixed_s + moved_bytes / learned.bytes_per_s

    def extra_s(self, chip: str, call: DriverCall, moved_bytes: int) -> float:
        """What the deadline of a transfer allows beyond the floor of every call."""
        return DEADLINE_FACTOR * self.transfer_s(chip, call, moved_bytes)

    def basis(self, chip: str, calls: Iterable[DriverCall]) -> str:
        """How the expected times of some calls were found."""
        parts: list[str] = []
        for call in calls:
            learned = self._learned.get((chip, call))
            rate = (learned or _Learned(*PLANNED[call])).bytes_per_s / 1e9
            source = f"learned from {learned.samples}" if learned else "planned"
            parts.append(f"{call} at {rate:.1f} GB/s ({source})")
        return f"{chip}: {', '.join(parts)}"


def _mixed(learned: _Learned, known: float, newest: float) -> float:
    """The first sample counts in full; later ones move what is known."""
    return newest if learned.samples == 0 else (1 - NEWEST_WEIGHT) * known + NEWEST_WEIGHT * newest
