"""Decisions on requests: made one at a time. Their commits may overlap later decisions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, final
from weakref import WeakValueDictionary

from leasehold_coordinator.crash_points import crash_point
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.caller_bounds import CallerBounds
from leasehold_coordinator.fleet.callers import CallLimits, counted_caller, current_caller
from leasehold_coordinator.storage.write_health import COMMAND_REMEDY, WriteHealth, look_at

Created = TypeVar("Created")

BEGUN_LIMIT: Final = 1_024
"""Most requests that are served at once, with those whose callers have gone."""


@final
@dataclass(frozen=True, slots=True)
class Decision(Generic[Created]):
    """The answer to a request, and the write that must precede the answer.

    Attributes:
        created: The answer.
        storing: Stores and sends the command. None: there is nothing to store.
    """

    created: Created
    storing: Awaitable[None] | None = None


@final
class Decisions:
    """Makes decisions one at a time. Their commits may overlap later decisions.

    A decision checks a command and adds it to the ledger without an await between, so the next decision
    counts the command. Nothing is answered or sent before the command is on disk.

    Args:
        health: The health of the store.
        bounds: Told of the costs of refusals.
    """

    def __init__(self, health: WriteHealth, bounds: CallerBounds) -> None:
        self._health = health
        self._bounds = bounds
        self._deciding = asyncio.Lock()
        self._begun = CallLimits(BEGUN_LIMIT)
        self._storing: set[asyncio.Future[None]] = set()
        """One for each creation that is decided and not yet on disk."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By request id, while a request with that id is served."""

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is being made."""
        return self._deciding.locked()

    async def once(self, request_id: str, create: Callable[[], Coroutine[Any, Any, Created]]) -> Created:
        """Serves a request to its end, also if its caller is cancelled.

        A concurrent request with the same id waits, and then finds the command that the first one created. A
        store that does not answer is a refusal, and the request is served once it answers again.

        Args:
            request_id: The id of the request. Empty: the request waits for no other.
            create: Serves the request.

        Raises:
            FleetError: TOO_MANY_CALLS, STORAGE_UNAVAILABLE, or the refusal of the request.
        """

        async def serve() -> Created:
            with self._begun.entered(counted_caller()):
                if not request_id:
                    return await create()
                turn = self._turns.setdefault(request_id, asyncio.Lock())
                async with turn:
                    return await create()

        return await self._health.unless_stalled(
            serve(),
            COMMAND_REMEDY if request_id else look_at("get commands"),
            is_repeated=request_id in self._turns,
        )

    async def decide(self, decide: Callable[[], Awaitable[Decision[Created]]]) -> Created:
        """Makes a decision, and stores it while later decisions are made.

        A refusal may rest on a creation that is not on disk yet, and whose write may still fail. After such a
        refusal, the decision is made again once all pending creations are on disk or undone. No other
        decision is made meanwhile.

        Raises:
            FleetError: The request is refused, or the store failed. Nothing was created.
        """
        async with self._deciding:
            if (caller := current_caller()) is not None:
                self._bounds.require_no_debt(caller)
            try:
                decision = await self._try(decide)
            except FleetError:
                if not self._storing:
                    raise
                await self._settle()
                decision = await self._try(decide)
            if decision.storing is None:
                return decision.created
            stored = asyncio.get_running_loop().create_future()
            self._storing.add(stored)
        try:
            await decision.storing
        finally:
            self._storing.discard(stored)
            stored.set_result(None)
        crash_point("request-answered")
        return decision.created

    async def _try(self, decide: Callable[[], Awaitable[Decision[Created]]]) -> Decision[Created]:
        """Makes a decision. A refusal is charged here: its caller may have left, or have others waiting."""
        try:
            return await decide()
        except FleetError as error:
            if (caller := current_caller()) is not None:
                self._bounds.charge_refusal(caller, error)
            raise

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Excludes decisions within the context, which begins once all earlier ones are on disk or undone."""
        async with self._deciding:
            await self._settle()
            yield

    async def _settle(self) -> None:
        """Waits until every decided creation is on disk or undone."""
        if self._storing:
            await asyncio.wait(self._storing)
