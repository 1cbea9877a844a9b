"""Durations of device memory transfers: assumed at first, then measured on this host.

The assumption is a fixed time and a rate. The worker learns the ratio of the measured time to the assumed
one, per GPU model and direction: one for small transfers, where the fixed time decides, and one for large
ones. So an estimate for a known size is its last time. Ratios are lost when the agent ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.driver.helper_protocol import DriverCall

PLANNED: Final = {DriverCall.CHECKPOINT: (0.4, 2e9), DriverCall.RESTORE: (0.5, 4e9)}
"""Fixed seconds and bytes per second of slow data-centre GPUs."""

LARGE_BYTES: Final = 2**28
"""Size from which the rate makes up most of the time."""

LEAST_RATIO: Final = 0.01
MOST_RATIO: Final = 20.0
NEWEST_WEIGHT: Final = 0.3
DEADLINE_FACTOR: Final = 3.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time, with its basis as text."""

    duration_s: float
    basis: str


@final
class Rates:
    """Measured transfer rates of this host's GPUs."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, DriverCall, bool], float] = {}

    def learn(self, chip: str, call: DriverCall, moved_bytes: int, duration_s: float) -> None:
        """Learns from one successful transfer."""
        key = chip, call, moved_bytes >= LARGE_BYTES
        newest = min(max(LEAST_RATIO, duration_s / _planned_s(call, moved_bytes)), MOST_RATIO)
        known = self._ratios.get(key, newest)
        self._ratios[key] = (1 - NEWEST_WEIGHT) * known + NEWEST_WEIGHT * newest

    def transfer_s(self, chip: str, call: DriverCall, moved_bytes: int) -> float:
        """The expected duration of a transfer."""
        ratio = self._ratios.get((chip, call, moved_bytes >= LARGE_BYTES), 1.0)
        return ratio * _planned_s(call, moved_bytes)

    def extra_s(self, chip: str, call: DriverCall, moved_bytes: int) -> float:
        """Time that a transfer's deadline adds to the floor of every call."""
        return DEADLINE_FACTOR * self.transfer_s(chip, call, moved_bytes)

    def basis(self, chip: str, calls: Iterable[DriverCall], moved_bytes: int) -> str:
        """The basis of the expected times of some calls, as text."""
        parts: list[str] = []
        for call in calls:
            was_seen = (chip, call, moved_bytes >= LARGE_BYTES) in self._ratios
            source = "as seen here" if was_seen else "assumed"
            rate = int(moved_bytes / self.transfer_s(chip, call, moved_bytes))
            parts.append(f"{call} of {size_text(moved_bytes)} at {size_text(rate)}/s ({source})")
        return f"{chip}: {', '.join(parts)}"


def _planned_s(call: DriverCall, moved_bytes: int) -> float:
    fixed_s, bytes_per_s = PLANNED[call]
    return fixed_s + moved_bytes / bytes_per_s
