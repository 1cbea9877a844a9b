"""A change that tasks wait for, again and again."""

from typing import final

import trio


@final
class Change:
    """Wakes all tasks that wait at the moment of a notification."""

    def __init__(self) -> None:
        self._event = trio.Event()

    async def wait(self) -> None:
        """Waits for the next notification."""
        await self._event.wait()

    def notify(self) -> None:
        """Wakes the waiting tasks."""
        self._event.set()
        self._event = trio.Event()
