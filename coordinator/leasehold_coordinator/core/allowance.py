"""An allowance that is used up and refills at a steady rate: a token bucket. Pure."""

from typing import final


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
        self._refill(now)
        if self._left < amount:
            return (amount - self._left) / self._per_s
        self._left -= amount
        return 0.0

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
