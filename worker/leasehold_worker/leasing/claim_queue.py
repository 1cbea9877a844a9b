"""The queue of waiting claims and its order. Pure but for the event that notifies a claim.

Claims are served by priority, and first come, first served among equals. A claim never waits for a later
one, because resources are reserved for it while it waits. Reserved host resources (CPU time, memory, disk)
are those of its request. Reserved GPUs are all suitable GPUs while too few are free, and only the chosen
GPUs while just host resources are missing. So small claims can't starve a large claim, and a large claim
blocks small claims no more than needed. A claim that could not be granted even if every lease ended, because
GPUs are cordoned, unhealthy or used by foreign processes, blocks no other claim. Preemptible workloads come
last, and get nothing while another claim waits for GPUs alone. A claim that waits for host resources keeps
no GPU from preemptible workloads, since they release GPUs on request.
"""

import time
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
    """A waiting claim.

    Attributes:
        workload_id: The holder of the future lease.
        request: The requested GPUs.
        priority: Higher goes first.
        helper: The workload is preemptible.
        host: The requested host resources other than GPUs.
        has_host: Whether the resources are available now, beside those reserved for other claims.
        take_host: Reserves these in the same step; False if they are not available.
        since: Time of its arrival.
        number: Its place among equals.
        granted: Set with ``lease``.
        lease: The granted lease.
        since_s: Time of its arrival, by the monotonic clock.
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
    since_s: float = field(default_factory=time.monotonic)

    @property
    def turn(self) -> tuple[bool, int, int]:
        """The sort key of the claim; smaller goes first."""
        return (self.helper, -self.priority, self.number)

    @property
    def wants_gpus_alone(self) -> bool:
        """Whether the claim waits for GPUs only, as most do."""
        return self.request.count > 0 and self.host == NOTHING


@final
class ClaimQueue(Generic[Granted]):
    """The waiting claims, in queue order."""

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
        """Number of waiting claims that are not preemptible."""
        return sum(not waiter.helper for waiter in self._waiters)

    @property
    def wants_gpus_alone(self) -> bool:
        """Whether all waiting claims wait for GPUs only."""
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
        """Adds a claim, behind its equals."""
        waiter = Waiter[Granted](
            workload_id, request, priority, helper, host, has_host, take_host, since, next(self._numbers)
        )
        insort(self._waiters, waiter, key=lambda waiter: waiter.turn)
        self._wanting_more += not waiter.wants_gpus_alone
        return waiter

    def remove(self, waiter: Waiter[Granted]) -> None:
        """Removes a claim."""
        self._waiters.remove(waiter)
        self._wanting_more -= not waiter.wants_gpus_alone

    def ahead_of(self, priority: int, *, helper: bool) -> list[Waiter[Granted]]:
        """The claims ahead of a new one."""
        return [waiter for waiter in self._waiters if waiter.turn[:2] <= (helper, -priority)]


@dataclass(frozen=True, slots=True)
class Kept:
    """Resources reserved for waiting claims.

    Attributes:
        gpu_uuids: GPUs.
        host: CPU time, memory and disk, free or not.
    """

    gpu_uuids: frozenset[str] = frozenset()
    host: HostRequest = NOTHING


def kept_with(
    kept: Kept, waiter: Waiter[Granted], chosen: tuple[str, ...] | None, obtainable: frozenset[str]
) -> Kept:
    """The reservations once one more claim waits, for the chosen GPUs. None: too few are free."""
    if not obtainable:
        return kept
    gpu_uuids = obtainable if chosen is None else frozenset(chosen)
    return Kept(kept.gpu_uuids | gpu_uuids, kept.host + waiter.host)
