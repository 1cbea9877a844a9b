"""The GPUs of this host, and who leases which.

One slot per GPU, in an order that is fixed at start. Whose turn it is, is said in
:mod:`leasehold_worker.claim_queue`, and which GPUs a request gets in :mod:`leasehold_worker.gpu_choice`. A
GPU that is cordoned, unhealthy or in the hands of processes that we don't know is granted to nobody; who
holds it already keeps it.
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import final

import trio
from leasehold.v1 import errors_pb2, gpu_pb2
from leasehold.v1.gpu_pb2 import GpuHealth

from leasehold_worker.claim_queue import ClaimQueue, Waiter, due_to
from leasehold_worker.errors import OperationError
from leasehold_worker.gpu_choice import GpuRequest, PoolGpu, choose
from leasehold_worker.gpu_health import excludes
from leasehold_worker.gpu_refusals import cordoned, not_enough, not_free, shortage, wanted
from leasehold_worker.leases import (
    FOREIGN,
    FREE,
    OK,
    Cordon,
    ForeignProcess,
    Lease,
    LeaseId,
    LeaseSnapshot,
    SlotLease,
    Standing,
)


@final
class GpuPool:
    """The pool. It belongs to one trio thread, and only ``claim`` waits.

    Args:
        gpus: The GPUs, in slot order.
        keep: Told the standing of a GPU whenever it is another, and under "" that of the worker.
    """

    def __init__(
        self, gpus: Sequence[PoolGpu], keep: Callable[[str, Standing], None] = lambda *_: None
    ) -> None:
        now = datetime.now(UTC)
        self.gpus = tuple(gpus)
        self._by_uuid = {gpu.uuid: gpu for gpu in gpus}
        self._slots = {gpu.uuid: SlotLease(gpu.uuid, slot, now) for slot, gpu in enumerate(gpus)}
        self._keep = keep
        self._leases: dict[LeaseId, Lease] = {}
        self._queue = ClaimQueue[Lease]()
        self._changed = trio.Event()
        self._revision = 0
        self._free_bytes: Mapping[str, int] = {}
        # Later starts of the worker begin with a greater token, since time goes on.
        self._last_token = time.time_ns()
        self.worker_cordon: Cordon | None = None
        """Nothing new is granted while the whole worker is cordoned."""

    @property
    def capacity(self) -> int:
        """Number of GPUs."""
        return len(self._slots)

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
        return LeaseSnapshot(self._revision, tuple(self._slots.values()))

    def slot(self, gpu_uuid: str) -> SlotLease:
        """The slot of a GPU.

        Raises:
            OperationError: UNKNOWN_GPU.
        """
        try:
            return self._slots[gpu_uuid]
        except KeyError:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                f"{gpu_uuid} is not a GPU of this worker",
                {"gpu_uuid": gpu_uuid},
            ) from None

    async def wait_changed(self) -> None:
        """Waits for the next change of any slot, or of who waits."""
        await self._changed.wait()

    async def claim(
        self,
        workload_id: str,
        request: GpuRequest,
        *,
        priority: int = 0,
        helper: bool = False,
        has_rest: Callable[[], bool] = lambda: True,
        take_rest: Callable[[], bool] = lambda: True,
    ) -> Lease | None:
        """Waits its turn for GPUs.

        If cancelled, it leaves no trace. Returns None at once where the pool has no GPUs.

        Args:
            workload_id: Who is to hold the lease.
            request: What is wanted.
            priority: Higher goes first.
            helper: Waits behind everybody else.
            has_rest: Whether what else is wanted is to be had now.
            take_rest: Takes that, in the same step as the grant, or says that it can't. Call
                :meth:`note_rest` once it could.

        Raises:
            OperationError: NO_FREE_GPU, the pool can never grant that.
        """
        if not self._slots:
            await trio.lowlevel.checkpoint()
            return None
        self.check_possible(request)
        waiter = self._queue.add(
            workload_id,
            request,
            priority=priority,
            helper=helper,
            has_rest=has_rest,
            take_rest=take_rest,
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
        if not self._slots:
            return None
        self.check_possible(request)
        due = due_to(self._queue.ahead_of(priority, helper=False), self.obtainable)
        return self._choose(request, due)

    def choose_if_free(
        self, request: GpuRequest, freed: Collection[str], taken: Collection[str]
    ) -> tuple[str, ...] | None:
        """The GPUs that a request would get if some leased ones were free. None: not enough.

        Args:
            request: What is wanted.
            freed: Leased GPUs that count as free.
            taken: GPUs that count as taken.
        """
        free = [
            self._by_uuid[slot.gpu_uuid]
            for slot in self._slots.values()
            if (slot.lease is None or slot.gpu_uuid in freed)
            and slot.may_serve(request)
            and slot.gpu_uuid not in taken
        ]
        return choose(free, request, self._free_bytes)

    @property
    def holds_back_helpers(self) -> bool:
        """Whether somebody waits for GPUs, and for nothing else, who is no helper."""
        return any(
            not waiter.helper and waiter.has_rest() and bool(self.obtainable(waiter.request))
            for waiter in self._queue
        )

    def unclaimed(self, *, allow_foreign: bool = False, for_helper: bool = False) -> list[str]:
        """The GPUs that are free and due to nobody who waits, in slot order.

        Args:
            allow_foreign: Those with processes that we don't know too.
            for_helper: For a helper that is to be woken: none while somebody waits for GPUs, else all.
        """
        usable = (FREE, FOREIGN) if allow_foreign else (FREE,)
        if for_helper:
            due = frozenset(self._slots) if self.holds_back_helpers else frozenset()
        else:
            due = due_to(list(self._queue), self.obtainable)
        return [uuid for uuid, slot in self._slots.items() if slot.state in usable and uuid not in due]

    def claim_gpus(self, workload_id: str, gpu_uuids: Sequence[str], *, allow_foreign: bool = False) -> Lease:
        """Claims these very GPUs without waiting, in this order, whoever waits for them.

        Raises:
            OperationError: UNKNOWN_GPU, DUPLICATE_GPU, NO_FREE_GPU, CORDONED, GPU_UNHEALTHY or
                FOREIGN_PROCESS.
        """
        self.check_free(gpu_uuids, allow_foreign=allow_foreign)
        return self._take(workload_id, gpu_uuids)

    def reserve_gpus(
        self, workload_id: str, gpu_uuids: Sequence[str], *, allow_foreign: bool = False
    ) -> Lease:
        """As :meth:`claim_gpus`, RESERVED until :meth:`reassign` or :meth:`release`."""
        self.check_free(gpu_uuids, allow_foreign=allow_foreign)
        return self._take(workload_id, gpu_uuids, reserved=True)

    def occupy(self, workload_id: str, gpu_uuids: Sequence[str], *, reserved: bool = False) -> Lease:
        """Leases GPUs to a workload that is on them already, whatever is held against them.

        Raises:
            OperationError: UNKNOWN_GPU, or NO_FREE_GPU where one is leased.
        """
        for gpu_uuid in gpu_uuids:
            if self.slot(gpu_uuid).lease is not None:
                raise not_free(self.slot(gpu_uuid))
        return self._take(workload_id, gpu_uuids, reserved=reserved)

    def adopt(self, lease: Lease, *, reserved: bool = False) -> Lease:
        """Takes back a lease of an earlier start of the worker. GPUs that are no more are left out.

        Returns:
            The lease over those of its GPUs that this worker has.
        """
        self._last_token = max(self._last_token, lease.fencing_token)
        unleased = {slot.gpu_uuid for slot in self._slots.values() if slot.lease is None}
        mine = tuple(gpu_uuid for gpu_uuid in lease.gpu_uuids if gpu_uuid in unleased)
        if not mine:
            return replace(lease, gpu_uuids=())
        adopted = replace(lease, gpu_uuids=mine)
        self._leases[lease.lease_id] = adopted
        self._hold(mine, adopted, reserved=reserved)
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
        self._hold(left, None)
        self.serve()
        return leases

    def release(self, lease: Lease) -> bool:
        """Frees the lease's GPUs. False: it had been released before, and nothing was done."""
        held = self._leases.pop(lease.lease_id, None)
        if held is None:
            return False
        # Of a lease that was adopted in part, the caller may have the whole.
        self._hold(held.gpu_uuids, None)
        self.serve()
        return True

    def cordon(self, gpu_uuid: str, cordon: Cordon | None) -> None:
        """Takes a GPU out of service for new work, or puts it back; "" is the whole worker.

        Raises:
            OperationError: UNKNOWN_GPU.
        """
        if gpu_uuid:
            self._stand(gpu_uuid, replace(self.slot(gpu_uuid).standing, cordon=cordon))
        else:
            self.worker_cordon = cordon
            self._keep("", Standing(cordon))
            self.note_change()
        self.serve()

    def set_health(self, gpu_uuid: str, health: GpuHealth.ValueType, reason: str) -> None:
        """Takes in what was found about a GPU. What excludes it stays until it is reset, or is lost."""
        before = self.slot(gpu_uuid).standing
        if not excludes(before.health) or (health == gpu_pb2.GPU_HEALTH_LOST != before.health):
            self._stand(gpu_uuid, replace(before, health=health, health_reason=reason))
            self.serve()

    def reset_health(self, gpu_uuid: str) -> None:
        """Forgets what is known against a GPU.

        Raises:
            OperationError: UNKNOWN_GPU.
        """
        self._stand(gpu_uuid, replace(self.slot(gpu_uuid).standing, health=OK, health_reason=""))
        self.serve()

    def restore_standing(self, gpu_uuid: str, standing: Standing) -> None:
        """Takes back what an earlier start of the worker held against a GPU, or under "" against itself."""
        if gpu_uuid in self._slots:
            self._put(replace(self._slots[gpu_uuid], standing=standing))
        elif not gpu_uuid:
            self.worker_cordon = standing.cordon

    def observe(
        self, foreign: Mapping[str, tuple[ForeignProcess, ...]], free_bytes: Mapping[str, int]
    ) -> None:
        """Takes in who else is on the GPUs, and how much of their memory is free.

        Args:
            foreign: Processes that belong to no workload, by GPU. A GPU is missing where NVML can't say: what
                was known of it stays.
            free_bytes: Free memory by GPU; missing likewise.
        """
        self._free_bytes = free_bytes
        for gpu_uuid, processes in foreign.items():
            if gpu_uuid in self._slots and self._slots[gpu_uuid].foreign != processes:
                self._put(replace(self._slots[gpu_uuid], foreign=processes))
        self.serve()

    def check_free(self, gpu_uuids: Sequence[str], *, allow_foreign: bool = False) -> None:
        """Refuses what :meth:`claim_gpus` would refuse."""
        usable = (FREE, FOREIGN) if allow_foreign else (FREE,)
        if gpu_uuids and self.worker_cordon is not None:
            raise cordoned("the worker", self.worker_cordon)
        for gpu_uuid in gpu_uuids:
            if self.slot(gpu_uuid).state not in usable:
                raise not_free(self.slot(gpu_uuid))
        if len(set(gpu_uuids)) != len(gpu_uuids):
            raise OperationError(errors_pb2.ERROR_REASON_DUPLICATE_GPU, "a GPU is named twice: name it once")

    def check_possible(self, request: GpuRequest) -> None:
        """Refuses what this pool could not grant if all of it were free.

        Raises:
            OperationError: NO_FREE_GPU; UNKNOWN_GPU where one is named that it has not.
        """
        for gpu_uuid in request.gpu_uuids:
            self.slot(gpu_uuid)
        if request.count < 1 or choose(self.gpus, request, {}) is None:
            fitting = sum(map(request.allows, self.gpus))
            raise OperationError(
                errors_pb2.ERROR_REASON_NO_FREE_GPU,
                f"{wanted(request)} can't be claimed from a worker that has {self.capacity}, of which "
                f"{fitting} would do: ask for less",
                {"field": "gpu_count"},
            )

    def why_not(self, request: GpuRequest) -> OperationError:
        """Why a request can't be granted now, and what would help."""
        if self.worker_cordon is not None:
            return cordoned("the worker", self.worker_cordon)
        return not_enough(request, self._fitting(request), self.pending_claimers)

    def what_lacks(self, request: GpuRequest) -> str:
        """What a request waits for, in words."""
        if self.worker_cordon is not None:
            return cordoned("the worker", self.worker_cordon).message
        return shortage(request, self._fitting(request))

    def _fitting(self, request: GpuRequest) -> list[SlotLease]:
        return [slot for slot in self._slots.values() if request.allows(self._by_uuid[slot.gpu_uuid])]

    def note_rest(self) -> None:
        """What ``take_rest`` takes is another: grants what can be granted by now."""
        self.serve()
        self.note_change()

    def serve(self) -> None:
        """Grants what can be granted."""
        if self.worker_cordon is not None:
            return
        waiting = tuple(self._queue)  # helpers are last
        self._serve(takewhile(lambda waiter: not waiter.helper, waiting))
        if waiting and waiting[-1].helper and not self.holds_back_helpers:
            self._serve(waiter for waiter in waiting if waiter.helper)

    def _serve(self, waiters: Iterable[Waiter[Lease]]) -> None:
        due: frozenset[str] = frozenset()
        refused: set[GpuRequest] = set()
        for waiter in waiters:
            if not self._has_unleased(due):
                return
            # What was refused to one is refused to an equal behind it: less is left for that.
            chosen = None if waiter.request in refused else self._choose(waiter.request, due)
            if chosen is not None and waiter.take_rest():
                self._queue.remove(waiter)
                waiter.lease = self._take(waiter.workload_id, chosen)
                waiter.granted.set()
            else:
                refused.add(waiter.request)
                due |= self.obtainable(waiter.request)

    def _has_unleased(self, due: frozenset[str]) -> bool:
        return any(slot.lease is None and slot.gpu_uuid not in due for slot in self._slots.values())

    def _choose(self, request: GpuRequest, due: frozenset[str]) -> tuple[str, ...] | None:
        return None if self.worker_cordon is not None else self.choose_if_free(request, (), due)

    def obtainable(self, request: GpuRequest) -> frozenset[str]:
        """The GPUs of which a request could get some if every lease ended. Empty: not enough of them."""
        serving = [self._by_uuid[slot.gpu_uuid] for slot in self._slots.values() if slot.may_serve(request)]
        if choose(serving, request, {}) is None:
            return frozenset()
        return frozenset(gpu.uuid for gpu in serving if request.allows(gpu))

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
        self._hold(gpu_uuids, lease, reserved=reserved)
        return lease

    def _stand(self, gpu_uuid: str, standing: Standing) -> None:
        if standing != self.slot(gpu_uuid).standing:
            self._put(replace(self._slots[gpu_uuid], standing=standing))
            self._keep(gpu_uuid, standing)

    def _hold(self, gpu_uuids: Iterable[str], lease: Lease | None, *, reserved: bool = False) -> None:
        for gpu_uuid in gpu_uuids:
            self._slots[gpu_uuid] = replace(
                self._slots[gpu_uuid], lease=lease, reserved=reserved, since=datetime.now(UTC)
            )
            self.note_change()

    def _put(self, after: SlotLease) -> None:
        before = self._slots[after.gpu_uuid]
        moved = after.state != before.state
        self._slots[after.gpu_uuid] = replace(after, since=datetime.now(UTC)) if moved else after
        self.note_change()

    def note_change(self) -> None:
        """Wakes those who wait for a change."""
        self._revision += 1
        self._changed.set()
        self._changed = trio.Event()
