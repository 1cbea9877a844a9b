"""The GPUs of this host, and who leases which.

One slot per GPU, in an order that is fixed at start. Claims are granted first come, first served, all of
their GPUs or none; while anybody waits, ``try_claim`` gets nothing, so it can't take what a waiter is due.
"""

import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, NewType, final

import trio
from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.lease_pb2 import SlotState

from leasehold_worker.errors import OperationError

LeaseId = NewType("LeaseId", str)

FREE: Final = lease_pb2.SLOT_STATE_FREE
RESERVED: Final = lease_pb2.SLOT_STATE_RESERVED
LEASED: Final = lease_pb2.SLOT_STATE_LEASED


@dataclass(frozen=True, slots=True)
class Lease:
    """An exclusive hold of GPUs.

    Attributes:
        lease_id: Unique, and never used again.
        workload_id: The holder.
        gpu_uuids: Its GPUs, in the order in which the holder sees them.
        grant_time: When it was granted.
        fencing_token: Greater than that of every earlier lease of this worker.
    """

    lease_id: LeaseId
    workload_id: str
    gpu_uuids: tuple[str, ...]
    grant_time: datetime
    fencing_token: int


@dataclass(frozen=True, slots=True)
class SlotLease:
    """What one slot of the pool is doing."""

    gpu_uuid: str
    slot: int
    state: SlotState.ValueType
    since: datetime
    lease: Lease | None = None


@dataclass(eq=False, slots=True)
class _Waiter:
    count: int
    workload_id: str
    granted: trio.Event = field(default_factory=trio.Event)
    lease: Lease | None = None


@final
class GpuPool:
    """The pool. It belongs to one trio thread, and only ``claim`` waits."""

    def __init__(self, gpu_uuids: Sequence[str]) -> None:
        now = datetime.now(UTC)
        self._slots = [SlotLease(gpu_uuid, slot, FREE, now) for slot, gpu_uuid in enumerate(gpu_uuids)]
        self._leases: dict[LeaseId, Lease] = {}
        self._waiters: deque[_Waiter] = deque()
        self._changed = trio.Event()
        # Later starts of the worker begin with a greater token, since time goes on.
        self._last_token = time.time_ns()

    @property
    def capacity(self) -> int:
        """Number of GPUs."""
        return len(self._slots)

    @property
    def pending_claimers(self) -> int:
        """Number of claims that wait. Momentary: it may have changed when the caller looks at it."""
        return len(self._waiters)

    def snapshot_leases(self) -> tuple[SlotLease, ...]:
        """Every slot as it is now, in slot order, which is that of ``hello``."""
        return tuple(self._slots)

    async def wait_changed(self) -> None:
        """Waits for the next change of any slot."""
        await self._changed.wait()

    async def claim(self, workload_id: str, count: int = 1) -> Lease | None:
        """Waits its turn for GPUs; the lowest free slots win.

        If cancelled, it leaves no trace. Returns None at once where the pool has no GPUs.

        Raises:
            OperationError: The pool can never grant so many.
        """
        if not self._slots:
            await trio.lowlevel.checkpoint()
            return None
        self._check_count(count)
        waiter = _Waiter(count, workload_id)
        self._waiters.append(waiter)
        self._serve_waiters()
        try:
            await waiter.granted.wait()
        except trio.Cancelled:
            if waiter.lease is not None:
                self.release(waiter.lease)
            else:
                self._waiters.remove(waiter)
                self._serve_waiters()
            raise
        return waiter.lease

    def try_claim(self, workload_id: str, count: int = 1) -> Lease | None:
        """Claims without waiting. None: somebody waits, too few are free, or the pool has no GPUs.

        Raises:
            OperationError: The pool can never grant so many.
        """
        if not self._slots:
            return None
        self._check_count(count)
        if self._waiters:
            return None
        return self._grant(workload_id, count)

    def claim_gpus(self, workload_id: str, gpu_uuids: Sequence[str]) -> Lease:
        """Claims these very GPUs without waiting, in this order.

        Raises:
            OperationError: UNKNOWN_GPU, DUPLICATE_GPU, or NO_FREE_GPU where one of them is not free.
        """
        self.check_free(gpu_uuids)
        return self._take(workload_id, gpu_uuids, LEASED)

    def reserve_gpus(self, workload_id: str, gpu_uuids: Sequence[str]) -> Lease:
        """As :meth:`claim_gpus`, RESERVED until :meth:`reassign` or :meth:`release`."""
        self.check_free(gpu_uuids)
        return self._take(workload_id, gpu_uuids, RESERVED)

    def adopt(self, lease: Lease, *, reserved: bool = False) -> Lease:
        """Takes back a lease of an earlier start of the worker. GPUs that are no more are left out.

        Returns:
            The lease over those of its GPUs that this worker has.
        """
        free = {slot.gpu_uuid for slot in self._slots if slot.state == FREE}
        mine = tuple(gpu_uuid for gpu_uuid in lease.gpu_uuids if gpu_uuid in free)
        if not mine:
            return replace(lease, gpu_uuids=())
        adopted = replace(lease, gpu_uuids=mine)
        self._last_token = max(self._last_token, lease.fencing_token)
        self._leases[lease.lease_id] = adopted
        self._set(mine, RESERVED if reserved else LEASED, adopted)
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
        live = [lease for lease in given_up if self._leases.pop(lease.lease_id, None) is not None]
        left = {gpu_uuid for lease in live for gpu_uuid in lease.gpu_uuids}
        leases: dict[str, Lease] = {}
        for workload_id, gpu_uuids in wanted:
            mine = [gpu_uuid for gpu_uuid in gpu_uuids if gpu_uuid in left]
            left -= set(mine)
            if mine:
                leases[workload_id] = self._take(workload_id, mine, LEASED)
        self._set(left, FREE, None)
        self._serve_waiters()
        return leases

    def release(self, lease: Lease) -> bool:
        """Frees the lease's GPUs. False: it had been released before, and nothing was done."""
        if self._leases.pop(lease.lease_id, None) is None:
            return False
        self._set(lease.gpu_uuids, FREE, None)
        self._serve_waiters()
        return True

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.capacity:
            raise OperationError(
                errors_pb2.ERROR_REASON_NO_FREE_GPU,
                f"{count} GPUs can't be claimed from a worker that has {self.capacity}",
                {"field": "gpu_count"},
            )

    def check_free(self, gpu_uuids: Sequence[str]) -> None:
        """Refuses what :meth:`claim_gpus` would refuse."""
        slots = {slot.gpu_uuid: slot for slot in self._slots}
        for gpu_uuid in gpu_uuids:
            if gpu_uuid not in slots:
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                    f"{gpu_uuid} is not a GPU of this worker",
                    {"gpu_uuid": gpu_uuid},
                )
            if slots[gpu_uuid].state != FREE:
                raise OperationError(
                    errors_pb2.ERROR_REASON_NO_FREE_GPU,
                    f"{gpu_uuid} is {_describe(slots[gpu_uuid])}: choose another, or suspend its holder",
                    {"gpu_uuid": gpu_uuid},
                )
        if len(set(gpu_uuids)) != len(gpu_uuids):
            raise OperationError(errors_pb2.ERROR_REASON_DUPLICATE_GPU, "a GPU is named twice: name it once")

    def _serve_waiters(self) -> None:
        """Grants from the head of the queue. Who can't be served holds up those behind, so nobody starves."""
        while self._waiters and (lease := self._grant(self._waiters[0].workload_id, self._waiters[0].count)):
            waiter = self._waiters.popleft()
            waiter.lease = lease
            waiter.granted.set()

    def _grant(self, workload_id: str, count: int) -> Lease | None:
        free = [slot.gpu_uuid for slot in self._slots if slot.state == FREE]
        return self._take(workload_id, free[:count], LEASED) if len(free) >= count else None

    def _take(self, workload_id: str, gpu_uuids: Sequence[str], state: SlotState.ValueType) -> Lease:
        self._last_token += 1
        lease = Lease(
            LeaseId(f"l-{uuid.uuid4().hex[:12]}"),
            workload_id,
            tuple(gpu_uuids),
            datetime.now(UTC),
            self._last_token,
        )
        self._leases[lease.lease_id] = lease
        self._set(gpu_uuids, state, lease)
        return lease

    def _set(self, gpu_uuids: Iterable[str], state: SlotState.ValueType, lease: Lease | None) -> None:
        changing, now = set(gpu_uuids), datetime.now(UTC)
        self._slots = [
            replace(slot, state=state, since=now, lease=lease) if slot.gpu_uuid in changing else slot
            for slot in self._slots
        ]
        self._changed.set()
        self._changed = trio.Event()


def _describe(slot: SlotLease) -> str:
    name = lease_pb2.SlotState.Name(slot.state).removeprefix("SLOT_STATE_").lower()
    return f"{name} for workload {slot.lease.workload_id}" if slot.lease else name
