"""Who waits for GPUs, in which order, and whose turn it is. Pure but for the event that tells a waiter.

The rule: claims go by priority, and first come, first served among equals. A claim is passed over only on
GPUs that it could not use: so a large claim is not starved by small ones, and a small one is not held up
where it makes no difference. One that could not be granted even if every lease ended, because GPUs are
cordoned, unhealthy or in foreign hands, holds up nobody. Helpers come behind everybody, and get nothing while
anybody else waits for GPUs. Who waits for CPU time or memory, or could not be granted at all, keeps no helper
from them.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Generic, TypeVar, final

import trio

from leasehold_worker.gpu_choice import GpuRequest

Granted = TypeVar("Granted")


@dataclass(eq=False, slots=True)
class Waiter(Generic[Granted]):
    """A claim that waits.

    Attributes:
        workload_id: Who is to hold the lease.
        request: The GPUs that are wanted.
        priority: Higher goes first.
        helper: It is opportunistic work.
        has_rest: Whether what else is wanted is to be had now.
        take_rest: Takes that, in the same step; False where it is not to be had.
        since: When it came.
        number: Its place among equals.
        granted: Set with ``lease``.
        lease: What it was granted.
    """

    workload_id: str
    request: GpuRequest
    priority: int
    helper: bool
    has_rest: Callable[[], bool]
    take_rest: Callable[[], bool]
    since: datetime
    number: int
    granted: trio.Event = field(default_factory=trio.Event)
    lease: Granted | None = None

    @property
    def turn(self) -> tuple[bool, int, int]:
        """Smaller goes first."""
        return (self.helper, -self.priority, self.number)


@final
class ClaimQueue(Generic[Granted]):
    """The claims that wait, in the order of their turn."""

    def __init__(self) -> None:
        self._waiters: list[Waiter[Granted]] = []
        self._numbers = count()

    def __iter__(self) -> Iterator[Waiter[Granted]]:
        return iter(tuple(self._waiters))

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def pending_claimers(self) -> int:
        """How many wait that are no helpers."""
        return sum(not waiter.helper for waiter in self._waiters)

    def add(
        self,
        workload_id: str,
        request: GpuRequest,
        *,
        priority: int,
        helper: bool,
        has_rest: Callable[[], bool],
        take_rest: Callable[[], bool],
        since: datetime,
    ) -> Waiter[Granted]:
        """Takes a claim in, behind its equals."""
        waiter = Waiter[Granted](
            workload_id, request, priority, helper, has_rest, take_rest, since, next(self._numbers)
        )
        insort(self._waiters, waiter, key=lambda waiter: waiter.turn)
        return waiter

    def remove(self, waiter: Waiter[Granted]) -> None:
        """Takes a claim out."""
        self._waiters.remove(waiter)

    def ahead_of(self, priority: int, *, helper: bool) -> list[Waiter[Granted]]:
        """The claims that a new one would wait behind."""
        return [waiter for waiter in self._waiters if waiter.turn[:2] <= (helper, -priority)]


def due_to(
    waiters: list[Waiter[Granted]], obtainable: Callable[[GpuRequest], frozenset[str]]
) -> frozenset[str]:
    """The GPUs that are kept for claims which wait: all that one of them could use.

    Args:
        waiters: The claims, none of which can be granted now.
        obtainable: The GPUs that a request could get if every lease ended. Empty: not enough of them.
    """
    return frozenset().union(*(obtainable(request) for request in {waiter.request for waiter in waiters}))
