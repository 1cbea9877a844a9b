"""A rate limit on reports of refused workers: a few per host and minute, then the number of the others.

A peer can fail a thousand times per second. One event and one log line for each would displace all others.
"""

import logging
import time
from dataclasses import dataclass
from typing import Final, final

from leasehold_coordinator.fleet.callers import host_of
from leasehold_coordinator.fleet.event_log import Events

logger = logging.getLogger(__name__)

TOLD_LIMIT: Final = 10
"""Refusals of one host that are reported one by one in a period."""

PERIOD_S: Final = 60.0
HOST_LIMIT: Final = 256
"""Hosts that are counted apart. All further hosts count as one."""

_OTHERS: Final = "other hosts"


@dataclass(slots=True)
class _Period:
    began: float
    told: int = 0
    left_out: int = 0


@final
class Refusals:
    """Decides which refusals are reported, and reports the number of the others."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._periods: dict[str, _Period] = {}

    def may_tell(self, peer: str) -> bool:
        """Whether a refusal of this peer is reported. Otherwise the refusal is counted."""
        return self.may_tell_host(host_of(peer))

    def may_tell_host(self, host: str) -> bool:
        """As :meth:`may_tell`, for the host of a peer."""
        if host not in self._periods and len(self._periods) >= HOST_LIMIT:
            host = _OTHERS
        period = self._periods.setdefault(host, _Period(time.monotonic()))
        if period.told < TOLD_LIMIT:
            period.told += 1
            return True
        period.left_out += 1
        return False

    def tick(self) -> None:
        """Ends expired periods, and reports how many refusals each left out."""
        now = time.monotonic()
        for host, period in list(self._periods.items()):
            if now - period.began < PERIOD_S:
                continue
            del self._periods[host]
            if period.left_out:
                message = (
                    f"{period.left_out} more workers or sessions of {host} were refused within "
                    f"{PERIOD_S:g} s, besides {period.told} reported one by one: stop or repair that host's "
                    "worker"
                )
                logger.warning("%s", message)
                self._events.refusals_left_out(message)
