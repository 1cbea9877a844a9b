"""An allowance that is used up and refills at a steady rate: a token bucket. Pure."""

from typing import Final, final

SWEEP_S: Final = 1.0
"""Least time between two sweeps of full allowances."""

_OTHERS: Final = "others"


@final
class Allowance:
    """An allowance, full at first.

    Args:
        per_s: What it regains in a second.
        burst: The most that it holds.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._noted_s = 0.0

    def take(self, amount: float, now: float) -> float:
        """Takes an amount if so much is left.

        Args:
            amount: The amount.
            now: The present time, by the monotonic clock.

        Returns:
            0 if the amount was taken. Otherwise the seconds after which so much is left.
        """
        if not (wait_s := self.wait_s(amount, now)):
            self._left -= amount
        return wait_s

    def wait_s(self, amount: float, now: float) -> float:
        """The seconds after which an amount is left. Takes nothing."""
        self._refill(now)
        return max(0.0, (amount - self._left) / self._per_s)

    def charge(self, amount: float, now: float) -> None:
        """Takes an amount, also if less is left. The debt must be regained first."""
        self._refill(now)
        self._left -= amount

    def is_full(self, now: float) -> bool:
        """Whether nothing was taken that is not regained."""
        self._refill(now)
        return self._left >= self._burst

    def _refill(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._noted_s)
        self._noted_s = now
        self._left = min(self._burst, self._left + elapsed_s * self._per_s)


@final
class Allowances:
    """An allowance for each key. A full one is not kept.

    Args:
        per_s: What each regains in a second.
        burst: The most that each holds.
        limit: Keys that are counted apart. All further keys share one allowance.
    """

    def __init__(self, per_s: float, burst: float, limit: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._limit = limit
        self._by_key: dict[str, Allowance] = {}
        self._swept_s = 0.0

    def of(self, key: str, now: float) -> Allowance:
        """The allowance of a key."""
        if key not in self._by_key and len(self._by_key) >= self._limit:
            self._sweep(now)
            if len(self._by_key) >= self._limit:
                key = _OTHERS
        if key not in self._by_key:
            self._by_key[key] = Allowance(self._per_s, self._burst)
        return self._by_key[key]

    def _sweep(self, now: float) -> None:
        if now - self._swept_s >= SWEEP_S:
            self._swept_s = now
            self._by_key = {key: one for key, one in self._by_key.items() if not one.is_full(now)}
