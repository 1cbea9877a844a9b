"""The log of refusals of the local API. Users can cause them at any rate, and must not fill the disk."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final, final

logger = logging.getLogger(__name__)

PERIOD_S: Final = 60.0
USER_LIMIT: Final = 64
"""Users whose refusals have lines of their own within a period. All further users share lines."""


@dataclass(slots=True)
class _Period:
    began_s: float
    left_out: int = 0


@final
class RefusalLog:
    """Logs the first refusal of a user by a kind of call in each period, and counts the others.

    The next line of the user has their number. Callable from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._periods: dict[tuple[int | None, str], _Period] = {}
        """By user id and kind of call. None: all further users."""

    def note(self, uid: int, kind: str, text: str) -> None:
        """Logs or counts a refusal.

        Args:
            uid: The user.
            kind: What was refused: one of a few names of ours, such as a method.
            text: The line, with process and user.
        """
        with self._lock:
            left_out = self._count(uid, kind, time.monotonic())
        if left_out is not None:
            more = f" ({left_out} such refusals before were left out)" if left_out else ""
            logger.warning("%s%s", text, more)

    def _count(self, uid: int, kind: str, now_s: float) -> int | None:
        """Number of refusals without a line before this one. None: this one gets no line either."""
        if (uid, kind) not in self._periods and len({user for user, _ in self._periods}) >= USER_LIMIT:
            self._periods = {
                key: period for key, period in self._periods.items() if now_s - period.began_s < PERIOD_S
            }
        known = {user for user, _ in self._periods}
        key = (uid if uid in known or len(known) < USER_LIMIT else None, kind)
        period = self._periods.get(key)
        if period is not None and now_s - period.began_s < PERIOD_S:
            period.left_out += 1
            return None
        self._periods[key] = _Period(now_s)
        return period.left_out if period is not None else 0
