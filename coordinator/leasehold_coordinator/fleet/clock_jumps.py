"""Jumps of the host's clock, on which the expiry of credentials depends. Each large jump is an event."""

import logging
import time
from typing import Final, final

from leasehold_coordinator.fleet.event_log import Events
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import jumped_ns

logger = logging.getLogger(__name__)

LARGE_JUMP_NS: Final = 3_600 * 10**9


@final
class ClockJumps:
    """Notices jumps while the coordinator runs, and a clock that went back while it did not.

    Args:
        events: Gets an event for each jump.
        store: Knows the highest time so far.
    """

    def __init__(self, events: Events, store: Store) -> None:
        self._events = events
        self._seen_ns = jumped_ns()
        behind_ns = store.highest_time_ns - time.time_ns()
        if behind_ns > LARGE_JUMP_NS:
            self._tell(
                f"the store has seen a time {behind_ns / 1e9:.0f} s ahead of this host's clock, by which "
                "credentials expire: set the clock, or accept it by the setting clock_corrected"
            )

    def check(self) -> None:
        """Looks for a jump since the last look."""
        jump_ns = jumped_ns() - self._seen_ns
        if abs(jump_ns) > LARGE_JUMP_NS:
            self._seen_ns += jump_ns
            direction = "forward" if jump_ns > 0 else "back"
            self._tell(
                f"the clock of the coordinator's host jumped {direction} by {abs(jump_ns) / 1e9:.0f} s; "
                "credentials expire by the highest time so far"
            )

    def _tell(self, message: str) -> None:
        logger.warning("%s", message)
        self._events.clock_jumped(message)
