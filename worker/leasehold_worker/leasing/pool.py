"""The leases of this host's GPUs, and who waits for one.

:mod:`leasehold_worker.leasing.claim_queue` orders claims, :mod:`leasehold_worker.leasing.gpu_selection` picks
GPUs for a request, and :mod:`leasehold_worker.leasing.slots` knows the state of each GPU.
"""

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from itertools import takewhile
from typing import Final, final

import trio

from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.claim_queue import ClaimQueue, Kept, Waiter, kept_with
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.host_reservations import NOTHING, HostRequest
from leasehold_worker.leasing.leases import Lease, LeaseId, LeaseSnapshot, Standing
from leasehold_worker.leasing.refusals import cordoned, not_enough, not_free
from leasehold_worker.leasing.slots import GpuSlots

TOKEN_BITS: Final = 32
"""Bits of a fencing token that count the leases of one start. The others are the number of the start."""


@final
class GpuPool:
    """The pool. It belongs to one trio thread, and only ``claim`` waits.

    Args:
        gpus: The GPUs, in slot order.
        keep: Told the standing of a GPU whenever it is another, and under "" that of the worker.
        start_number: How often the worker has been started. The fencing tokens of a start are greater than
            those of every earlier start, whatever the clock says.
    """

    def __init__(
        self,
        gpus: Sequence[PoolGpu],
        keep: Callable[[str, Standing], None] = lambda *_: None,
        start_number: int = 0,
    ) -> None:
        self.slots = GpuSlots(gpus, keep, self.serve)
        """The GPUs, and what is held against each."""
        self._leases: dict[LeaseId, Lease] = {}
        self._queue = ClaimQueue[Lease]()
        self._last_token = start_number << TOKEN_BITS

    @property
    def capacity(self) -> int:
        """Number of GPUs."""
        return len(self.slots.gpus)

    @property
    def pending_claimers(self) -> int:
        """Number of claims that wait, helpers not counted. Momentary."""
        return self._queue.pending_claimers

    @property
    def waiting(self) -> tuple[Waiter[Lease], ...]:
        """The claims that wait, helpers too, in the order of their turn."""
        return tuple(self._queue)

    def snapshot_leases(self) -> LeaseSnapshot:
        """Every slot as it is now."""
        return self.slots.snapshot()

    async def wait_changed(self) -> None:
        """Waits for the next change of any slot, or of who waits."""
        await self.slots.wait_changed()

    def note_change(self) -> None:
        """Wakes those who wait for a change."""
        self.slots.note_change()

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
        """Waits its turn for GPUs.

        If cancelled, it leaves no trace. Returns None at once where the pool has no GPUs.

        Args:
            workload_id: Who is to hold the lease.
            request: What is wanted.
            priority: Higher goes first.
            helper: Waits behind everybody else.
            host: What is wanted of the host beside GPUs.
            has_host: Whether that is there now, beside what is kept for claims that go first.
            take_host: Takes that, in the same step as the grant, or says that it can't. Call
                :meth:`note_host` once it could.

        Raises:
            OperationError: NO_FREE_GPU, the pool can never grant that.
        """
        if not self.capacity:
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
        self.note_change()
        self.serve()
        try:
            await waiter.granted.wait()
        except trio.Cancelled:
            if waiter.lease is not None:
                self.release(waiter.lease)
            else:
                self._queue.remove(waiter)
                self.note_change()
                self.serve()
            raise
        return waiter.lease

    def try_claim(self, workload_id: str, request: GpuRequest, *, priority: int = 0) -> Lease | None:
        """Claims without waiting. None: they are not free, or somebody who waits is due them.

        Raises:
            OperationError: NO_FREE_GPU, the pool can never grant that.
        """
        chosen = self.preview(request, priority=priority)
        return self._take(workload_id, chosen) if chosen is not None else None

    def preview(self, request: GpuRequest, *, priority: int = 0) -> tuple[str, ...] | None:
        """The GPUs that :meth:`try_claim` would take now.

        Raises:
            OperationError: NO_FREE_GPU, the pool can never grant that.
        """
        if not self.capacity:
            return None
        self.slots.check_possible(request)
        return self._choose(request, self._kept(self._queue.ahead_of(priority, helper=False)).gpu_uuids)

    def kept_host(self, priority: int, *, helper: bool = False) -> HostRequest:
        """What is kept of the host for claims that go before a new one."""
        return self._kept(self._queue.ahead_of(priority, helper=helper)).host

    @property
    def holds_back_helpers(self) -> bool:
        """Whether somebody waits for GPUs, and for nothing else, who is no helper."""
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
        """The GPUs that are free and due to nobody who waits, in slot order.

        Args:
            allow_foreign: Those with processes that we don't know too.
            for_helper: For a helper that is to be woken: none while somebody waits for GPUs, else all.
        """
        if for_helper:
            due = frozenset(gpu.uuid for gpu in self.slots.gpus) if self.holds_back_helpers else frozenset()
        else:
            due = self._kept(self._queue).gpu_uuids
        return [gpu_uuid for gpu_uuid in self.slots.free(allow_foreign=allow_foreign) if gpu_uuid not in due]

    def claim_gpus(self, workload_id: str, gpu_uuids: Sequence[str], *, allow_foreign: bool = False) -> Lease:
        """Claims these very GPUs without waiting, in this order, whoever waits for them.

        Raises:
            OperationError: UNKNOWN_GPU, DUPLICATE_GPU, NO_FREE_GPU, CORDONED, GPU_UNHEALTHY or
                FOREIGN_PROCESS.
        """
        self.slots.check_free(gpu_uuids, allow_foreign=allow_foreign)
        return self._take(workload_id, gpu_uuids)

    def reserve_gpus(
        self, workload_id: str, gpu_uuids: Sequence[str], *, allow_foreign: bool = False
    ) -> Lease:
        """As :meth:`claim_gpus`, RESERVED until :meth:`reassign` or :meth:`release`."""
        self.slots.check_free(gpu_uuids, allow_foreign=allow_foreign)
        return self._take(workload_id, gpu_uuids, reserved=True)

    def occupy(self, workload_id: str, gpu_uuids: Sequence[str], *, reserved: bool = False) -> Lease:
        """Leases GPUs to a workload that is on them already, whatever is held against them.

        Raises:
            OperationError: UNKNOWN_GPU, or NO_FREE_GPU where one is leased.
        """
        for gpu_uuid in gpu_uuids:
            if self.slots.get(gpu_uuid).lease is not None:
                raise not_free(self.slots.get(gpu_uuid))
        return self._take(workload_id, gpu_uuids, reserved=reserved)

    def adopt(self, lease: Lease, *, reserved: bool = False) -> Lease:
        """Takes back a lease of an earlier start of the worker. GPUs that are no more are left out.

        Returns:
            The lease over those of its GPUs that this worker has.
        """
        self._last_token = max(self._last_token, lease.fencing_token)
        unleased = self.slots.unleased()
        mine = tuple(gpu_uuid for gpu_uuid in lease.gpu_uuids if gpu_uuid in unleased)
        if not mine:
            return replace(lease, gpu_uuids=())
        adopted = replace(lease, gpu_uuids=mine)
        self._leases[lease.lease_id] = adopted
        self.slots.hold(mine, adopted, reserved=reserved)
        return adopted

    def reassign(
        self, given_up: Sequence[Lease], wanted: Sequence[tuple[str, Sequence[str]]]
    ) -> dict[str, Lease]:
        """Gives up leases and reservations for new leases over some of their GPUs, all in one step.

        A lease that was released before counts for nothing, since its GPUs may be somebody else's by now.

        Args:
            given_up: What is exchanged.
            wanted: Workloads with the GPUs that each is to have; the others become free.

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
        self.slots.hold(left, None)
        self.serve()
        return leases

    def release(self, lease: Lease) -> bool:
        """Frees the lease's GPUs. False: it had been released before, and nothing was done."""
        held = self._leases.pop(lease.lease_id, None)
        if held is None:
            return False
        # Of a lease that was adopted in part, the caller may have the whole.
        self.slots.hold(held.gpu_uuids, None)
        self.serve()
        return True

    def why_not(self, request: GpuRequest) -> OperationError:
        """Why a request can't be granted now, and what would help."""
        if self.slots.worker_cordon is not None:
            return cordoned("the worker", self.slots.worker_cordon)
        return not_enough(request, self.slots.fitting(request), self.pending_claimers)

    def note_host(self) -> None:
        """What ``take_host`` takes is another: grants what can be granted by now."""
        self.serve()
        self.note_change()

    def serve(self) -> None:
        """Grants what can be granted."""
        if self.slots.worker_cordon is not None:
            return
        waiting = tuple(self._queue)  # helpers are last
        kept = self._serve(takewhile(lambda waiter: not waiter.helper, waiting), Kept())
        if waiting and waiting[-1].helper and not self.holds_back_helpers:
            self._serve((waiter for waiter in waiting if waiter.helper), Kept(host=kept.host))

    def _serve(self, waiters: Iterable[Waiter[Lease]], kept: Kept) -> Kept:
        """Grants what can be granted, and says what is kept for the others."""
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
        """Whether claims that go first keep all GPUs: then who wants GPUs alone gets and keeps none."""
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
