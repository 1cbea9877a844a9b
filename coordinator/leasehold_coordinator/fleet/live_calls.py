"""The calls under way, which end when their caller is refused: by a revocation, a block or an expiry."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeAlias, final

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.errors import FleetError

CHECK_INTERVAL_S: Final = 2.0
"""Time between two checks of all calls."""

End: TypeAlias = Callable[[FleetError], None]
"""Ends a call with an error. Called once."""


@final
class LiveCalls:
    """The calls of clients and the sessions of workers.

    Args:
        refusal: Why a caller is refused by now. None: the caller is not.
    """

    def __init__(self, refusal: Callable[[Caller], FleetError | None]) -> None:
        self._refusal = refusal
        self._calls: dict[object, tuple[Caller, End]] = {}

    def counts(self) -> Counter[str]:
        """Numbers of calls and sessions, by the serial number of the certificate of their connections."""
        return Counter(caller.serial for caller, _ in self._calls.values() if caller.serial)

    def require(self, caller: Caller) -> None:
        """Refuses a caller that is refused by now.

        Raises:
            FleetError: The refusal.
        """
        refusal = self._refusal(caller)
        if refusal is not None:
            raise refusal

    @contextmanager
    def entered(self, caller: Caller, end: End) -> Iterator[None]:
        """Counts a call as live within the context.

        Raises:
            FleetError: The caller is refused already.
        """
        self.require(caller)
        key = object()
        self._calls[key] = caller, end
        try:
            yield
        finally:
            self._calls.pop(key, None)

    @asynccontextmanager
    async def serving(self, caller: Caller) -> AsyncIterator[None]:
        """A context that ends, by a cancellation within it, as soon as the caller is refused.

        Raises:
            FleetError: The refusal.
        """
        refusals: list[FleetError] = []
        try:
            async with asyncio.timeout(None) as scope:

                def end(refusal: FleetError) -> None:
                    refusals.append(refusal)
                    scope.reschedule(0.0)

                with self.entered(caller, end):
                    yield
        except TimeoutError:
            if refusals:
                raise refusals.pop() from None
            raise

    def check(self) -> None:
        """Ends the calls whose caller is refused by now."""
        for key, (caller, end) in list(self._calls.items()):
            refusal = self._refusal(caller)
            if refusal is not None:
                self._calls.pop(key, None)
                end(refusal)

    async def watch(self) -> None:
        """Checks all calls, over and over. Never returns."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check()
