"""A rate limit on failed attempts of each address. Successful attempts are not limited. Pure."""

from dataclasses import dataclass
from typing import Final, final

FAILURE_LIMIT: Final = 10
"""Failures of one address in a period, after which its attempts need a valid secret."""

PERIOD_S: Final = 60.0
ADDRESS_LIMIT: Final = 4_096
"""Addresses that are counted. The address with the oldest period is forgotten first."""


@dataclass(slots=True)
class _Period:
    began_s: float
    failures: int = 0


@final
class FailureLimits:
    """The failures of each address in its present period."""

    def __init__(self) -> None:
        self._periods: dict[str, _Period] = {}
        """By address, the oldest period first."""

    def wait_s(self, address: str, now_s: float) -> float:
        """How long an address has to wait for its next attempt. 0: not at all."""
        period = self._periods.get(address)
        if period is None or period.failures < FAILURE_LIMIT:
            return 0.0
        return max(0.0, period.began_s + PERIOD_S - now_s)

    def fail(self, address: str, now_s: float) -> None:
        """Counts a failure."""
        period = self._periods.get(address)
        if period is None or now_s - period.began_s >= PERIOD_S:
            self._periods.pop(address, None)
            if len(self._periods) >= ADDRESS_LIMIT:
                del self._periods[next(iter(self._periods))]
            period = self._periods[address] = _Period(now_s)
        period.failures += 1
