"""Times in which this process did not run: it was stopped or frozen, or its host was overloaded.

A command that comes right after such a time may have waited in a socket meanwhile, so its timeout counts from
the begin of that time. Clocks of hosts need not agree. A command that came later ends EXPIRED at worst,
with nothing done.
"""

import time
from typing import Final, final

import trio

INTERVAL_S: Final = 0.25
NOTABLE_S: Final = 1.0
"""Shorter times count as none."""

AFTER_S: Final = 1.0
"""How long after a stall what comes counts as having waited for its end."""


@final
class Stalls:
    """Looks at the clock all the time, and sees when it could not."""

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._began_s = self._ended_s = float("-inf")

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            self._look()
            await trio.sleep(INTERVAL_S)

    def waited_s(self) -> float:
        """How long what comes now may have waited. 0: the process ran all the time, or nobody looked."""
        if self._looked_s is not None:
            self._look()
        now_s = time.monotonic()
        return now_s - self._began_s if now_s - self._ended_s <= AFTER_S else 0.0

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s >= INTERVAL_S + NOTABLE_S:
            self._began_s, self._ended_s = self._looked_s, now_s
        self._looked_s = now_s
