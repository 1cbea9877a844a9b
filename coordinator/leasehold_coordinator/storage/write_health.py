"""Whether the store can be written: by the outcome of each commit, and by the time that a commit takes."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.shielded_tasks import finish

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STALL_S: Final = 5.0
"""The deadline of a commit. Nothing can interrupt a disk that hangs: what waits for it is refused instead."""

LATE_S: Final = 1.0
"""A deadline noticed this late shows that this process was stopped. The deadline then starts again."""

COMMAND_REMEDY: Final = "repeat the request with its request_id, or look at `leasehold get commands`"
"""The remedy for a request with an id, which creates at most one command however often it is repeated."""

REPEAT_REMEDY: Final = "wait until the disk answers, then repeat the call"
"""The remedy for a call whose repetition is harmless, and whose change no list shows."""


@final
class WriteHealth:
    """The health of the store's disk. It belongs to the event loop."""

    def __init__(self) -> None:
        self.is_serving = True
        """Whether the last commit succeeded, and none is beyond its deadline."""
        self._stalled = asyncio.Event()
        self._changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether a commit is beyond its deadline."""
        return self._stalled.is_set()

    def begin(self, on_stall: Callable[[], None]) -> None:
        """A commit begins. The function is called at the deadline if the commit has not ended by then."""
        loop = asyncio.get_running_loop()
        due = loop.time() + STALL_S

        def stall() -> None:
            if loop.time() > due + LATE_S:
                self.begin(on_stall)
                return
            logger.error("the store's disk has not answered for %g s", STALL_S)
            self._stalled.set()
            self._set(is_serving=False)
            on_stall()

        self._deadline = loop.call_at(due, stall)

    def end(self, *, is_serving: bool) -> None:
        """A commit has ended.

        Args:
            is_serving: Whether the disk took the commit.
        """
        if self._deadline is not None:
            self._deadline.cancel()
        self._stalled.clear()
        self._set(is_serving=is_serving)

    def _set(self, *, is_serving: bool) -> None:
        if is_serving != self.is_serving:
            self.is_serving = is_serving
            self._changed.set()

    async def changed(self) -> bool:
        """Waits for the next change since the last call, and returns :attr:`is_serving`. For one caller."""
        await self._changed.wait()
        self._changed.clear()
        return self.is_serving

    async def unless_stalled(
        self,
        work: Coroutine[Any, Any, Result],
        remedy: str = REPEAT_REMEDY,
        *,
        is_repeated: bool = False,
    ) -> Result:
        """Does work with writes to its end, also if its caller is cancelled or refused.

        Args:
            work: The work.
            remedy: The caller's remedy if the work may be stored: see :func:`look_at`.
            is_repeated: The same work was begun before and has not ended, so it may still be stored.

        Raises:
            FleetError: STORAGE_UNAVAILABLE, a commit is beyond its deadline. The work was not begun, or it
                goes on and nobody knows whether it will be stored. Or the work's own error.
        """
        if self.is_stalled:
            work.close()
            raise _refusal(_may_be_stored(remedy) if is_repeated else "nothing was begun: try again later")
        begun = asyncio.ensure_future(finish(work))
        stall = asyncio.ensure_future(self._stalled.wait())
        try:
            await asyncio.wait({begun, stall}, return_when=asyncio.FIRST_COMPLETED)
            if begun.done():
                return begun.result()
            raise _refusal(_may_be_stored(remedy))
        finally:
            stall.cancel()
            begun.cancel()


def look_at(verb: str) -> str:
    """The remedy for a call without a request id whose change a verb of the command line shows."""
    return f"look at `leasehold {verb}` once the disk answers, then repeat the call if needed"


def _may_be_stored(remedy: str) -> str:
    return f"whether the request was stored is unknown: {remedy}"


def _refusal(remedy: str) -> FleetError:
    return FleetError(
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        f"the disk of the coordinator's store has not answered for {STALL_S:g} s; {remedy}",
    )


def stalled() -> FleetError:
    """The refusal of a write that was not begun."""
    return _refusal("nothing was written: try again later")
