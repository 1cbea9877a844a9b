"""Who waits for GPUs, in which order, and whose turn it is. Pure but for the event that tells a waiter.

The rule: claims go by priority, and first come, first served among equals. No claim is delayed by one behind
it: what it needs is kept for it while it waits. Of the host (CPU time, memory, disk), that is what it asks
for. Of the GPUs, it is all that the claim could use while too few of them are free, and no more than the
claim would take while only the host lacks something. So a large claim is not starved by small ones, and a
small one is not held up where it makes no difference. A claim that could not be granted even if every lease
ended, because GPUs are cordoned, unhealthy or in foreign hands, holds up nobody. Helpers come behind
everybody, and get nothing while anybody else waits for GPUs alone. A claim that waits for the host keeps no
GPU from them: they give it back.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Generic, TypeVar, final

import trio

from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.leasing.host_reservations import NOTHING, HostRequest

Granted = TypeVar("Granted")


@dataclass(eq=False, slots=True)
class Waiter(Generic[Granted]):
    """A claim that waits.

    Attributes:
        workload_id: Who is to hold the lease.
        request: The GPUs that are wanted.
        priority: Higher goes first.
        helper: It is opportunistic work.
        host: What is wanted of the host beside GPUs.
        has_host: Whether that is there now, beside what is kept for others.
        take_host: Takes that, in the same step; False where it is not there.
        since: When it came.
        number: Its place among equals.
        granted: Set with ``lease``.
        lease: What it was granted.
    """

    workload_id: str
    request: GpuRequest
    priority: int
    helper: bool
    host: HostRequest
    has_host: Callable[[HostRequest], bool]
    take_host: Callable[[HostRequest], bool]
    since: datetime
    number: int
    granted: trio.Event = field(default_factory=trio.Event)
    lease: Granted | None = None

    @property
    def turn(self) -> tuple[bool, int, int]:
        """Smaller goes first."""
        return (self.helper, -self.priority, self.number)

    @property
    def wants_gpus_alone(self) -> bool:
        """Whether it waits for GPUs and for nothing of the host, as most do."""
        return self.request.count > 0 and self.host == NOTHING


@final
class ClaimQueue(Generic[Granted]):
    """The claims that wait, in the order of their turn."""

    def __init__(self) -> None:
        self._waiters: list[Waiter[Granted]] = []
        self._numbers = count()
        self._wanting_more = 0

    def __iter__(self) -> Iterator[Waiter[Granted]]:
        return iter(tuple(self._waiters))

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def pending_claimers(self) -> int:
        """How many wait that are no helpers."""
        return sum(not waiter.helper for waiter in self._waiters)

    @property
    def wants_gpus_alone(self) -> bool:
        """Whether all that wait want GPUs alone."""
        return not self._wanting_more

    def add(
        self,
        workload_id: str,
        request: GpuRequest,
        *,
        priority: int,
        helper: bool,
        host: HostRequest,
        has_host: Callable[[HostRequest], bool],
        take_host: Callable[[HostRequest], bool],
        since: datetime,
    ) -> Waiter[Granted]:
        """Takes a claim in, behind its equals."""
        waiter = Waiter[Granted](
            workload_id, request, priority, helper, host, has_host, take_host, since, next(self._numbers)
        )
        insort(self._waiters, waiter, key=lambda waiter: waiter.turn)
        self._wanting_more += not waiter.wants_gpus_alone
        return waiter

    def remove(self, waiter: Waiter[Granted]) -> None:
        """Takes a claim out."""
        self._waiters.remove(waiter)
        self._wanting_more -= not waiter.wants_gpus_alone

    def ahead_of(self, priority: int, *, helper: bool) -> list[Waiter[Granted]]:
        """The claims that a new one would wait behind."""
        return [waiter for waiter in self._waiters if waiter.turn[:2] <= (helper, -priority)]


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept for claims that wait.

    Attributes:
        gpu_uuids: GPUs.
        host: CPU time, memory and disk, be they free now or not.
    """

    gpu_uuids: frozenset[str] = frozenset()
    host: HostRequest = NOTHING


def kept_with(
    kept: Kept, waiter: Waiter[Granted], chosen: tuple[str, ...] | None, obtainable: frozenset[str]
) -> Kept:
    """What is kept once one more claim waits, which would get the chosen GPUs now. None: too few are free."""
    if not obtainable:
        return kept
    gpu_uuids = obtainable if chosen is None else frozenset(chosen)
    return Kept(kept.gpu_uuids | gpu_uuids, kept.host + waiter.host)
