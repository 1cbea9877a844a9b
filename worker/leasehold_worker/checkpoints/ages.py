"""The age of stored data, on a host whose clock may jump.

A host that boots with a wrong date makes all data look old, and looks like a host that was off for as long.
So the wall clock gives only the age at first sight. A clock that never jumps adds the time since then. Data
counts as old only after it was seen for a day.
"""

import time
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Final, final

from leasehold_worker.checkpoints.retention import StoredItem

SEEN_FOR: Final = timedelta(days=1)
"""Time for an operator to notice a wrong date."""


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@final
class Ages:
    """Ages of the data that one run of the worker has seen.

    Args:
        clock: Seconds of a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float] = _seconds_since_boot) -> None:
        self._clock = clock
        self._first: dict[str, tuple[float, timedelta]] = {}
        """By id: time of the first sight, and the age then."""

    def expired(
        self, kept: Collection[StoredItem], in_use: Collection[str], *, now: datetime, keep_for: timedelta
    ) -> list[str]:
        """Chooses data to delete for its age, even if there is room.

        Args:
            kept: All stored data. An item that is missing once counts as new when it comes again.
            in_use: Ids of needed items, which stay.
            now: The time by the wall clock.
            keep_for: Age at which an item is deleted.

        Returns:
            Ids to delete, the oldest first.
        """
        seconds = self._clock()
        ages = {each.image_id: max(timedelta(0), now - each.create_time) for each in kept}
        self._first = {image_id: self._first.get(image_id, (seconds, age)) for image_id, age in ages.items()}
        old = []
        for image_id, (first, age) in self._first.items():
            since = timedelta(seconds=seconds - first)
            is_old = age + since >= keep_for and since >= min(keep_for, SEEN_FOR)
            if is_old and image_id not in in_use:
                old.append((age + since, image_id))
        return [image_id for _, image_id in sorted(old, key=lambda each: (-each[0], each[1]))]
