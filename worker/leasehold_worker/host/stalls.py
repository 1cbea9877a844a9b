"""Stalls: times in which this process did not run, because it was stopped or its host overloaded.

A command that arrives right after a stall may have waited in a socket meanwhile, so its timeout counts from
the stall's begin. Clocks of hosts need not agree. A command that arrived later ends EXPIRED at worst, with
nothing done.
"""

import time
from typing import Final, final

import trio

INTERVAL_S: Final = 0.25
NOTABLE_S: Final = 1.0
"""Shorter stalls are ignored."""

AFTER_S: Final = 1.0
"""Time after a stall in which received messages count as having waited."""


@final
class Stalls:
    """Reads the clock all the time, and notices gaps."""

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._began_s = self._ended_s = float("-inf")

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._look()
            await trio.sleep(INTERVAL_S)

    def waited_s(self) -> float:
        """How long a message received now may have waited. 0: no recent stall, or the task does not run."""
        if self._looked_s is not None:
            self._look()
        now_s = time.monotonic()
        return now_s - self._began_s if now_s - self._ended_s <= AFTER_S else 0.0

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s >= INTERVAL_S + NOTABLE_S:
            self._began_s, self._ended_s = self._looked_s, now_s
        self._looked_s = now_s
