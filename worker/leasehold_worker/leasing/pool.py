"""The leases of this host's GPUs, and the claims that wait for GPUs.

:mod:`leasehold_worker.leasing.claim_queue` orders claims, :mod:`leasehold_worker.leasing.gpu_selection` picks
GPUs for a request, and :mod:`leasehold_worker.leasing.slots` knows the state of each GPU.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from itertools import takewhile
from typing import Final, final

import trio

from leasehold_worker import metrics
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.claim_queue import ClaimQueue, Kept, Waiter, kept_with
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.holds import Holds
from leasehold_worker.leasing.host_reservations import NOTHING, HostRequest
from leasehold_worker.leasing.leases import Hold, Lease, LeaseId, Standing
from leasehold_worker.leasing.refusals import cordoned, not_enough, not_free
from leasehold_worker.leasing.slots import GpuSlots

TOKEN_BITS: Final = 32
"""Bits of a fencing token that count the leases of one start. The higher bits hold the number of the start.
"""


@final
class GpuPool:
    """The pool. It belongs to one trio thread, and only ``claim`` waits.

    Args:
        gpus: The GPUs, in slot order.
        keep: Receives the UUID of a GPU with its changed standing. "" as UUID: the standing of the worker.
        start_number: Number of the worker's starts. So fencing tokens are greater than those of every earlier
            start, independent of the clock.
        keep_hold: Receives the id of a changed hold, and the hold or None at its end.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        gpus: Sequence[PoolGpu],
        keep: Callable[[str, Standing], None] = lambda *_: None,
        start_number: int = 0,
        keep_hold: Callable[[str, Hold | None], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = GpuSlots(gpus, keep, self.serve)
        """The GPUs: their leases for reading, their cordons, health verdicts and foreign processes."""
        self.holds = Holds(self.slots, self.serve, keep_hold, clock)
        """GPUs that suspends have freed for their callers."""
        self._leases: dict[LeaseId, Lease] = {}
        self._queue = ClaimQueue[Lease]()
        self._last_token = start_number << TOKEN_BITS

    @property
    def pending_claimers(self) -> int:
        """Number of waiting claims that are not preemptible, at this moment."""
        return self._queue.pending_claimers

    @property
    def waiting(self) -> tuple[Waiter[Lease], ...]:
        """The waiting claims, preemptible ones included, in queue order."""
        return tuple(self._queue)

    async def claim(
        self,
        workload_id: str,
        request: GpuRequest,
        *,
        priority: int = 0,
        helper: bool = False,
        host: HostRequest = NOTHING,
        has_host: Callable[[HostRequest], bool] = lambda _: True,
        take_host: Callable[[HostRequest], bool] = lambda _: True,
    ) -> Lease | None:
        """Waits in the queue for GPUs.

        A cancellation leaves no trace. Returns None at once if the pool has no GPUs.

        Args:
            workload_id: The holder.
            request: The GPUs.
            priority: Higher goes first.
            helper: The claim is preemptible, and waits behind all others.
            host: The requested host resources other than GPUs.
            has_host: Whether these are available now, beside those of earlier claims.
            take_host: Reserves these in the step of the grant, or returns False. Call :meth:`note_host` after
                a change.

        Raises:
            OperationError: NO_FREE_GPU, the pool can never grant the request.
        """
        if not self.slots.gpus:
            await trio.lowlevel.checkpoint()
            return None
        self.slots.check_possible(request)
        waiter = self._queue.add(
            workload_id,
            request,
            priority=priority,
            helper=helper,
            host=host,
            has_host=has_host,
            take_host=take_host,
            since=datetime.now(UTC),
        )
        self.slots.note_change()
        self.serve()
        try:
            await waiter.granted.wait()
        except trio.Cancelled:
            metrics.CLAIM_WAIT_SECONDS.labels("given_up").observe(time.monotonic() - waiter.since_s)
            if waiter.lease is not None:
                self.release(waiter.lease)
            else:
                self._queue.remove(waiter)
                self.slots.note_change()
                self.serve()
            raise
        metrics.CLAIM_WAIT_SECONDS.labels("granted").observe(time.monotonic() - waiter.since_s)
        return waiter.lease

    def try_claim(
        self, workload_id: str, request: GpuRequest, *, priority: int = 0, hold_id: str = ""
    ) -> Lease | None:
        """Claims without waiting. None: the GPUs are not free, or reserved for a waiting claim.

        Args:
            workload_id: The holder.
            request: The GPUs.
            priority: Higher goes first.
            hold_id: A hold, whose GPUs go before free ones. Empty: none.

        Raises:
            OperationError: NO_FREE_GPU, the pool can never grant the request; UNKNOWN_HOLD.
        """
        chosen = self.preview(request, priority=priority, hold_id=hold_id)
        return self._take(workload_id, chosen) if chosen is not None else None

    def preview(self, request: GpuRequest, *, priority: int = 0, hold_id: str = "") -> tuple[str, ...] | None:
        """The GPUs that :meth:`try_claim` would lease now.

        Raises:
            OperationError: NO_FREE_GPU, the pool can never grant the request; UNKNOWN_HOLD.
        """
        if not self.slots.gpus:
            return None
        self.slots.check_possible(request)
        kept = self._kept(self._queue.ahead_of(priority, helper=False)).gpu_uuids
        return self.holds.choose(hold_id, request, kept) if hold_id else self._choose(request, kept)

    def kept_host(self, priority: int) -> HostRequest:
        """Host resources reserved for claims ahead of a new one."""
        return self._kept(self._queue.ahead_of(priority, helper=False)).host

    @property
    def holds_back_helpers(self) -> bool:
        """Whether a claim that is not preemptible waits for GPUs only."""
        kept = NOTHING
        for waiter in self._queue:
            if waiter.helper:
                return False
            if self.slots.obtainable(waiter.request):
                if waiter.has_host(kept):
                    return True
                kept += waiter.host
        return False

    def _kept(self, waiters: Iterable[Waiter[Lease]]) -> Kept:
        kept, obtainable = Kept(), cache(self.slots.obtainable)
        for waiter in waiters:
            if self._all_kept(kept):
                if self._queue.wants_gpus_alone:
                    break
                if waiter.wants_gpus_alone:
                    continue
            chosen = self._choose(waiter.request, kept.gpu_uuids)
            kept = kept_with(kept, waiter, chosen, obtainable(waiter.request))
        return kept

    def unclaimed(self, *, allow_foreign: bool = False, for_helper: bool = False) -> list[str]:
        """The free GPUs that are reserved for no claim, in slot order.

        Args:
            allow_foreign: Include GPUs with foreign processes.
            for_helper: For the restore of a preempted workload: none while a claim waits for GPUs, else all.
        """
        if for_helper:
            due = frozenset(gpu.uuid for gpu in self.slots.gpus) if self.holds_back_helpers else frozenset()
        else:
            due = self._kept(self._queue).gpu_uuids
        return [gpu_uuid for gpu_uuid in self.slots.free(allow_foreign=allow_foreign) if gpu_uuid not in due]

    def claim_gpus(
        self, workload_id: str, gpu_uuids: Sequence[str], *, allow_foreign: bool = False, hold_id: str = ""
    ) -> Lease:
        """Leases named GPUs without waiting, in this order, even if claims wait for them.

        GPUs under the named hold count as free.

        Raises:
            OperationError: UNKNOWN_GPU, DUPLICATE_GPU, NO_FREE_GPU, CORDONED, GPU_UNHEALTHY,
                FOREIGN_PROCESS or UNKNOWN_HOLD.
        """
        self.slots.check_free(gpu_uuids, allow_foreign=allow_foreign, held=self.holds.gpus_of(hold_id))
        return self._take(workload_id, gpu_uuids)

    def reserve_gpus(
        self, workload_id: str, gpu_uuids: Sequence[str], *, allow_foreign: bool = False, hold_id: str = ""
    ) -> Lease:
        """As :meth:`claim_gpus`, RESERVED until :meth:`reassign` or :meth:`release`."""
        self.slots.check_free(gpu_uuids, allow_foreign=allow_foreign, held=self.holds.gpus_of(hold_id))
        return self._take(workload_id, gpu_uuids, reserved=True)

    def occupy(self, workload_id: str, gpu_uuids: Sequence[str], *, reserved: bool = False) -> Lease:
        """Leases GPUs to a workload that uses them already, even if cordoned or unhealthy.

        Raises:
            OperationError: UNKNOWN_GPU, or NO_FREE_GPU if one is leased.
        """
        for gpu_uuid in gpu_uuids:
            if self.slots.get(gpu_uuid).lease is not None:
                raise not_free(self.slots.get(gpu_uuid))
        return self._take(workload_id, gpu_uuids, reserved=reserved)

    def adopt(self, lease: Lease, *, reserved: bool = False) -> Lease:
        """Restores a lease after a restart of the worker. GPUs that no longer exist are left out.

        Returns:
            The lease of those GPUs that the worker still has.
        """
        self._last_token = max(self._last_token, lease.fencing_token)
        unleased = self.slots.unleased()
        mine = tuple(gpu_uuid for gpu_uuid in lease.gpu_uuids if gpu_uuid in unleased)
        if not mine:
            return replace(lease, gpu_uuids=())
        adopted = replace(lease, gpu_uuids=mine)
        self._leases[lease.lease_id] = adopted
        self.slots.hold(mine, adopted, reserved=reserved, since=lease.grant_time)
        return adopted

    def reassign(
        self, given_up: Sequence[Lease], wanted: Sequence[tuple[str, Sequence[str]]]
    ) -> dict[str, Lease]:
        """Exchanges leases and reservations for new leases of the same GPUs, in one step.

        Leases that were released before are ignored, since their GPUs may be leased again.

        Args:
            given_up: The old leases.
            wanted: The new GPUs of each workload; the others become free.

        Returns:
            The new lease of each workload that gets any.
        """
        live = [held for lease in given_up if (held := self._leases.pop(lease.lease_id, None)) is not None]
        left = {gpu_uuid for lease in live for gpu_uuid in lease.gpu_uuids}
        leases: dict[str, Lease] = {}
        for workload_id, gpu_uuids in wanted:
            mine = [gpu_uuid for gpu_uuid in gpu_uuids if gpu_uuid in left]
            left -= set(mine)
            if mine:
                leases[workload_id] = self._take(workload_id, mine)
        for lease in live:
            self._free(lease.workload_id, [gpu_uuid for gpu_uuid in lease.gpu_uuids if gpu_uuid in left])
        self.serve()
        return leases

    def release(self, lease: Lease) -> bool:
        """Frees the lease's GPUs. False: it was released before."""
        held = self._leases.pop(lease.lease_id, None)
        if held is None:
            return False
        # Of a lease that was adopted in part, the caller may have the whole.
        self._free(held.workload_id, held.gpu_uuids)
        self.serve()
        return True

    def _free(self, workload_id: str, gpu_uuids: Sequence[str]) -> None:
        """Frees GPUs of a workload, but for those that it releases into a hold."""
        self.slots.hold(self.holds.absorb(workload_id, gpu_uuids), None)

    def why_not(self, request: GpuRequest) -> OperationError:
        """Why a request can't be granted now, with a remedy."""
        if self.slots.worker_cordon is not None:
            return cordoned("the worker", self.slots.worker_cordon)
        return not_enough(request, self.slots.fitting(request), self.pending_claimers)

    def note_host(self) -> None:
        """Reports a change of host resources: grants claims that can be granted now."""
        self.serve()
        self.slots.note_change()

    def serve(self) -> None:
        """Grants the claims that can be granted."""
        if self.slots.worker_cordon is not None:
            return
        waiting = tuple(self._queue)  # preemptible workloads are last
        kept = self._serve(takewhile(lambda waiter: not waiter.helper, waiting), Kept())
        if waiting and waiting[-1].helper and not self.holds_back_helpers:
            self._serve((waiter for waiter in waiting if waiter.helper), Kept(host=kept.host))

    def _serve(self, waiters: Iterable[Waiter[Lease]], kept: Kept) -> Kept:
        """Grants the claims that can be granted, and returns the reservations of the others."""
        obtainable = cache(self.slots.obtainable)
        for waiter in waiters:
            if self._all_kept(kept):
                if self._queue.wants_gpus_alone:
                    break
                if waiter.wants_gpus_alone:
                    continue
            chosen = self._choose(waiter.request, kept.gpu_uuids)
            if chosen is not None and waiter.take_host(kept.host):
                self._queue.remove(waiter)
                waiter.lease = self._take(waiter.workload_id, chosen)
                waiter.granted.set()
            else:
                kept = kept_with(kept, waiter, chosen, obtainable(waiter.request))
        return kept

    def _choose(self, request: GpuRequest, due: frozenset[str]) -> tuple[str, ...] | None:
        return None if self.slots.worker_cordon is not None else self.slots.choose(request, (), due)

    def _all_kept(self, kept: Kept) -> bool:
        """Whether earlier claims reserve all GPUs, so that a claim for GPUs alone gets and reserves none."""
        return len(kept.gpu_uuids) == len(self.slots.gpus)

    def _take(self, workload_id: str, gpu_uuids: Sequence[str], *, reserved: bool = False) -> Lease:
        self._last_token += 1
        lease = Lease(
            LeaseId(f"l-{uuid.uuid4().hex[:12]}"),
            workload_id,
            tuple(gpu_uuids),
            datetime.now(UTC),
            self._last_token,
        )
        self._leases[lease.lease_id] = lease
        self.slots.hold(gpu_uuids, lease, reserved=reserved)
        return lease
