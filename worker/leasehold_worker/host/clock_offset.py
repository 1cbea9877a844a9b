"""The offset of the coordinator's clock from this host's, as the last welcome shows it."""

import logging
from typing import Final, final

from leasehold_worker.timestamps import LONGEST_S

logger = logging.getLogger(__name__)

WARNING_S: Final = 5.0
"""Offset from which on a warning is logged. NTP keeps clocks within milliseconds."""


@final
class ClockOffset:
    """The coordinator's clock minus this host's. The session to the coordinator measures it."""

    def __init__(self) -> None:
        self.offset_s: float | None = None
        """The smallest offset that explains the coordinator's time, in seconds. None: unknown."""

    def measure(self, asked_s: float, coordinator_s: float | None, answered_s: float) -> None:
        """Stores the offset, and logs a warning about a large one.

        The coordinator read its clock between question and answer. Any time between both may be right, so
        such a time is no offset, however slow the answer is.

        Args:
            asked_s: This host's time of the question, in seconds of the Unix epoch.
            coordinator_s: The coordinator's time in its answer. None: it has not told any.
            answered_s: This host's time of the answer.
        """
        if coordinator_s is None:
            self.offset_s = None
            return
        offset_s = coordinator_s - min(max(asked_s, coordinator_s), answered_s)
        self.offset_s = min(max(-LONGEST_S, offset_s), LONGEST_S)  # a coordinator may tell any time
        if abs(self.offset_s) > WARNING_S:
            logger.warning("%s: compare both clocks with those of an NTP server", offset_text(self.offset_s))


def offset_text(offset_s: float) -> str:
    """An offset as a sentence."""
    relation = "ahead of" if offset_s > 0 else "behind"
    return f"the coordinator's clock is {abs(offset_s):.1f} s {relation} this host's"
