"""Work whose result all callers share: one run at a time."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar, final

from leasehold_coordinator.shielded_tasks import start

Result = TypeVar("Result")

REST_LIMIT_S: Final = 2.0


@final
class SharedRuns(Generic[Result]):
    """Runs of one work. All callers that come during a run share the next one.

    So a caller waits for two runs at most. No caller gets the result of a run that began before its call.

    Args:
        rest: The least time between two runs, as a multiple of the time of a run, and 2 s at most.
    """

    def __init__(self, rest: float = 0.0) -> None:
        self._rest = rest
        self._rested_s = 0.0
        """When the next run may begin."""
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[Result] | None = None
        """The run that has not begun. None: nobody waits for one."""

    async def next(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of a run that begins now or later. A cancelled caller does not end the run.

        Args:
            work: The work, with a deadline.
        """
        if self._next is None:
            self._next = start(self._run(work))
        return await asyncio.shield(self._next)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._rested_s - time.monotonic()))
            self._next = None
            began_s = time.monotonic()
            try:
                return await work()
            finally:
                ended_s = time.monotonic()
                self._rested_s = ended_s + min(self._rest * (ended_s - began_s), REST_LIMIT_S)
