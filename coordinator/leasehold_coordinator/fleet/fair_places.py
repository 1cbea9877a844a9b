"""Places for concurrent work, of which one caller has a share. Others never wait behind all of its work."""

import asyncio
from collections.abc import Callable
from typing import final
from weakref import WeakValueDictionary


@final
class FairPlaces:
    """Places that are taken and given back.

    Args:
        count: Number of places.
        share: Most places of one caller, with those that it waits for. Its further work waits before them.
    """

    __slots__ = ("_all", "_share", "_shares")

    def __init__(self, count: int, share: int) -> None:
        self._all = asyncio.Semaphore(count)
        self._share = share
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By caller, while the caller has a place or waits."""

    async def take(self, caller: str) -> Callable[[], None]:
        """Waits for a place. The returned function gives the place back. A cancelled caller takes none."""
        own = self._shares.setdefault(caller, asyncio.Semaphore(self._share))
        await own.acquire()
        try:
            await self._all.acquire()
        except asyncio.CancelledError:
            own.release()
            raise

        def leave() -> None:
            self._all.release()
            own.release()

        return leave
