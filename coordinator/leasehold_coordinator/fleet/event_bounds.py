"""How many events the reports of one worker may cause. The events of all workers share one history."""

import logging
import time
from collections import Counter
from typing import final

from leasehold_coordinator.core.allowance import Allowance

logger = logging.getLogger(__name__)


@final
class EventBounds:
    """An allowance of events for each worker. Changes above the allowance are counted.

    Args:
        what: The things that change, for the log.
        per_s: Events of one worker per second, in the long run.
        burst: Events of one worker at once.
    """

    def __init__(self, what: str, per_s: float, burst: int) -> None:
        self._what = what
        self._per_s = per_s
        self._burst = burst
        self._allowances: dict[str, Allowance] = {}
        self._left_out: Counter[str] = Counter()
        """Changes without an event, by worker id. The next event has their number."""

    def admit(self, worker_id: str, count: int = 1) -> str | None:
        """Takes one or several events of a worker's allowance.

        Returns:
            The end of the event's message, empty if every earlier change has an event. None: the change gets
            no event.
        """
        allowance = self._allowances.setdefault(worker_id, Allowance(self._per_s, self._burst))
        if allowance.take(count, time.monotonic()):
            if not self._left_out[worker_id]:
                logger.warning("%s of worker %s change too often for an event of each", self._what, worker_id)
            self._left_out[worker_id] += 1
            return None
        left_out = self._left_out.pop(worker_id, 0)
        return f"; {left_out} earlier changes have no event" if left_out else ""

    def forget(self, worker_id: str) -> None:
        """Forgets a deleted worker."""
        self._allowances.pop(worker_id, None)
        self._left_out.pop(worker_id, None)
