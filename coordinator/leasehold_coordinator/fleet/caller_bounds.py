"""The bounds of one caller: requests and bytes per second, streams, and unfinished commands.

A caller is an identity, on whatever hosts it calls. A call on behalf of a user counts for both. A call that
proves no identity counts for its address. The Unix user of the coordinator and root have no bounds of their
own: they could stop the coordinator anyway, and must be able to act during a flood.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final
from weakref import WeakValueDictionary

from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.core.allowance import Allowance, Allowances
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.shielded_tasks import finish

Response = TypeVar("Response")

COMMAND_LIMIT: Final = 1_000

LIST_SHARE: Final = 1 / 3
LIST_BURST_S: Final = 2.0
"""The part of the time that one caller's lists may take in the long run, and seconds of lists at once.

A page of 1,000 commands takes 50 ms of a processor, which all threads of a Python process share.
"""

REQUESTS: Final = "caller_requests_per_s"
BYTES: Final = "caller_bytes_per_s"
"""Names of the rates, as settings and in refusals."""

BURST_S: Final = 4.0
"""A caller that was idle may use its rates of so many seconds at once."""

KEY_LIMIT: Final = 4_096
"""Callers that are counted apart. All further callers share one allowance."""

HOLD_S: Final = 5.0
"""How long a refusal of a caller above a rate is held back at most."""

HELD_LIMIT: Final = 1_024
"""Most refusals that are held back. Further ones are sent at once."""


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """The bounds of each caller.

    Attributes:
        requests_per_s: Requests per second.
        bytes_per_s: Bytes of requests per second.
        streams: Response streams at once, such as watches.
        commands: Unfinished commands.
    """

    requests_per_s: float = 50.0
    bytes_per_s: float = 4 * 2.0**20
    streams: int = 64
    commands: int = COMMAND_LIMIT


@final
class CallerBounds:
    """The recent requests and the streams of each caller.

    Args:
        limits: The bounds.
    """

    def __init__(self, limits: CallerLimits) -> None:
        self.limits = limits
        self._requests = _per_caller(limits.requests_per_s)
        self._bytes = _per_caller(limits.bytes_per_s)
        self._unknown = _per_caller(limits.requests_per_s)
        """By address. Nobody can use up the places of identities."""
        self._streams: Counter[str] = Counter()
        self._listing = Allowances(LIST_SHARE, LIST_BURST_S, KEY_LIMIT)
        self._list_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By caller, while a list of the caller is made."""
        self._held = 0
        """Number of refusals that are held back."""
        self._answers: dict[str, float] = {}
        """When the last of a caller's held refusals is sent."""

    async def hold(self, refusal: FleetError, key: str) -> None:
        """Holds the refusal of a caller above a rate back: its refusals do not exceed the rate either.

        Each connection has a bounded number of calls (HTTP/2). So a client that repeats refused calls at once
        is slowed down, and takes little of the event loop.

        Args:
            refusal: The refusal.
            key: The identity or address of the caller.
        """
        if refusal.metadata.get("bound") not in (REQUESTS, BYTES) or self._held >= HELD_LIMIT:
            return
        now = time.monotonic()
        after = max(now, self._answers.get(key, 0.0)) + 1 / self.limits.requests_per_s
        due = self._answers[key] = min(after, now + HOLD_S)
        self._held += 1
        try:
            await asyncio.sleep(due - now)
        finally:
            self._held -= 1
            if self._answers.get(key) == due:
                del self._answers[key]

    def admit(self, caller: Caller) -> None:
        """Counts a request of an identity, before its message is read.

        Raises:
            FleetError: TOO_MANY_CALLS, with the bound and when to try again.
        """
        if not caller.is_local_admin:
            self._admit(str(caller.identity))

    def admit_user(self, caller: Caller) -> None:
        """Counts a request for the user on whose behalf it is made, if there is one.

        Raises:
            FleetError: As :meth:`admit`.
        """
        if caller.on_behalf_of is not None:
            self._admit(str(caller.on_behalf_of))

    def admit_unknown(self, address: str) -> None:
        """Counts a request without an identity.

        Raises:
            FleetError: As :meth:`admit`.
        """
        self._admit_request(self._unknown, address)

    def _admit(self, key: str) -> None:
        now = time.monotonic()
        if wait_s := self._bytes.of(key, now).take(0, now):
            rate = f"{self.limits.bytes_per_s:g} bytes per second"
            raise _too_many(key, BYTES, rate, wait_s)
        self._admit_request(self._requests, key)

    def _admit_request(self, allowances: Allowances, key: str) -> None:
        now = time.monotonic()
        if wait_s := allowances.of(key, now).take(1, now):
            raise self._above_requests(key, wait_s)

    def _above_requests(self, key: str, wait_s: float) -> FleetError:
        return _too_many(key, REQUESTS, f"{self.limits.requests_per_s:g} requests per second", wait_s)

    def charge(self, caller: Caller, size_bytes: int) -> None:
        """Counts the bytes of a request that was read. A caller with a debt is not admitted."""
        now = time.monotonic()
        for key in _keys(caller):
            self._bytes.of(key, now).charge(size_bytes, now)

    def charge_refusal(self, caller: Caller, refusal: FleetError) -> None:
        """Counts what a refusal cost. A caller with a debt is not admitted."""
        now = time.monotonic()
        for key in _keys(caller):
            self._requests.of(key, now).charge(refusal.cost_requests, now)

    def require_no_debt(self, caller: Caller) -> None:
        """Refuses an admitted request of a caller whose later refusals have cost more than its rate allows.

        Raises:
            FleetError: As :meth:`admit`.
        """
        now = time.monotonic()
        for key in _keys(caller):
            if wait_s := self._requests.of(key, now).wait_s(0, now):
                raise self._above_requests(key, wait_s)

    async def list_in_turn(
        self, caller: Caller, make: Callable[[], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Makes one list of a caller at a time, after a rest if the lists before took more than their share.

        A list that has begun is finished, also if the caller leaves: nothing can interrupt its read.

        Args:
            caller: The caller.
            make: Makes the list.
        """
        if caller.is_local_admin:
            return await make()
        key = str(caller.identity)
        turn = self._list_turns.setdefault(key, asyncio.Lock())
        await turn.acquire()
        try:
            now = time.monotonic()
            allowance = self._listing.of(key, now)
            if wait_s := allowance.wait_s(0, now):
                await asyncio.sleep(wait_s)
        except BaseException:
            turn.release()
            raise
        return await finish(_list(turn, allowance, make))

    def open_stream(self, caller: Caller) -> Callable[[], None]:
        """Counts a response stream. The returned function ends the count.

        Raises:
            FleetError: TOO_MANY_CALLS.
        """
        keys = list(_keys(caller))
        for key in keys:
            if self._streams[key] >= self.limits.streams:
                raise FleetError(
                    errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
                    f"{key} has {self._streams[key]} streams, and one caller may have {self.limits.streams}: "
                    "end some of them",
                    bound="caller_streams",
                )
        self._streams.update(keys)

        def leave() -> None:
            for key in keys:
                self._streams[key] -= 1
                if not self._streams[key]:
                    del self._streams[key]

        return leave


async def _list(
    turn: asyncio.Lock, allowance: Allowance, make: Callable[[], Coroutine[Any, Any, Response]]
) -> Response:
    """Makes a list, counts its time, and ends the turn."""
    began_s = time.monotonic()
    try:
        return await make()
    finally:
        now = time.monotonic()
        allowance.charge(now - began_s, now)
        turn.release()


def _per_caller(per_s: float) -> Allowances:
    return Allowances(per_s, per_s * BURST_S, KEY_LIMIT)


def _keys(caller: Caller) -> Iterator[str]:
    """The identities for which a call counts."""
    if not caller.is_local_admin:
        yield str(caller.identity)
    if caller.on_behalf_of is not None:
        yield str(caller.on_behalf_of)


def _too_many(key: str, bound: str, rate: str, wait_s: float) -> FleetError:
    return FleetError(
        errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
        f"{key} is above {rate}, the bound {bound} of one caller: try again in {wait_s:.2f} s",
        retry_after_s=wait_s,
        bound=bound,
    )
