"""Holds: GPUs that a suspend has freed, reserved for the run or restore that names the hold.

A hold begins in the step in which the suspended workload releases its lease. So no waiting claim gets the
GPUs in between. A hold ends with the success of an operation that takes it, with its expiry, or by a call. It
does not expire while an operation takes it. If that operation fails, the hold has its GPUs again, and expires
as before.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.worker.v1.session_pb2 import CommandSpec

from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.leasing.leases import FOREIGN, FREE, Hold, Lease, LeaseId
from leasehold_worker.leasing.slots import GpuSlots
from leasehold_worker.timestamps import seconds

HOLD_LIMIT_S: Final = 600.0
"""Longest time of a hold."""

PREEMPT_LIMIT_S: Final = 7 * 86_400.0
"""Longest time of a hold between the suspends and the start of a command that preempts: that of a command."""

HELD_BY_LIMIT: Final = 256
"""Characters of the name of a hold's owner."""


@dataclass(frozen=True, slots=True)
class HoldTerms:
    """The hold that a suspend asks for.

    Attributes:
        hold_id: Its id: the id of the suspend command, or of the preempting command.
        hold_s: Its duration.
        held_by: Name of its owner, for people.
    """

    hold_id: str
    hold_s: float
    held_by: str = ""

    @classmethod
    def of(cls, command: CommandSpec) -> "HoldTerms | None":
        """The hold that a suspend asks for. None: none.

        Raises:
            OperationError: INVALID_ARGUMENT.
        """
        suspend = command.operation.suspend
        if suspend.hold_id:
            return cls(suspend.hold_id, PREEMPT_LIMIT_S)
        if not suspend.HasField("hold_for"):
            return None
        hold_s = seconds(suspend.hold_for)
        if not 0 < hold_s <= HOLD_LIMIT_S:
            raise invalid(
                "hold_for", f"invalid time {hold_s:g} s: give more than 0 s and at most {HOLD_LIMIT_S:g} s"
            )
        return cls(command.command_id, hold_s, suspend.held_by[:HELD_BY_LIMIT])


@final
class Holds:
    """The holds of one pool. They belong to the pool's trio thread.

    Args:
        slots: The GPUs.
        serve: Called once GPUs have become free.
        keep: Receives the id of a changed hold, and the hold or None at its end.
        clock: Seconds, which never run backwards.
    """

    def __init__(
        self,
        slots: GpuSlots,
        serve: Callable[[], None],
        keep: Callable[[str, Hold | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._serve = serve
        self._keep = keep
        self._clock = clock
        self._holds: dict[str, Hold] = {}
        self._deadlines: dict[str, float] = {}
        self._terms: dict[str, HoldTerms] = {}
        """The holds that suspends will begin, by workload."""
        self._takers: dict[str, str] = {}
        """The ids of holds that operations take, by workload."""
        self._changed = trio.Event()

    def __contains__(self, hold_id: str) -> bool:
        return hold_id in self._holds

    def __iter__(self) -> Iterator[Hold]:
        return iter(tuple(self._holds.values()))

    def taker_of(self, hold_id: str) -> str | None:
        """The workload that takes a hold. None: no operation takes it."""
        return next((taker for taker, taken_id in self._takers.items() if taken_id == hold_id), None)

    @contextmanager
    def begun_by(self, workload_id: str, terms: HoldTerms | None) -> Iterator[None]:
        """Puts the GPUs that a workload releases in this context under a hold. An exception ends the hold.

        Args:
            workload_id: The workload that is suspended.
            terms: The hold. None: the GPUs become free as usual.
        """
        if terms is not None:
            self.expect(workload_id, terms)
        done = False
        try:
            yield
            done = True
        finally:
            self.settle(workload_id, done=done)

    @contextmanager
    def taken_by(self, workload_id: str, hold_id: str) -> Iterator[None]:
        """Lets a workload take a hold in this context. An exception returns the GPUs to the hold.

        Args:
            workload_id: The workload that is started or restored.
            hold_id: The hold. Empty: none.

        Raises:
            OperationError: UNKNOWN_HOLD, or WORKLOAD_BUSY.
        """
        if hold_id:
            self.begin_taking(workload_id, hold_id)
        done = False
        try:
            yield
            done = True
        finally:
            self.settle(workload_id, done=done)

    def expect(self, workload_id: str, terms: HoldTerms) -> None:
        """Puts the GPUs that a workload releases from now on under a hold, until :meth:`settle`."""
        self._terms[workload_id] = terms

    def begin_taking(self, workload_id: str, hold_id: str) -> None:
        """Lets a workload take the GPUs of a hold, which does not expire until :meth:`settle`.

        Raises:
            OperationError: UNKNOWN_HOLD, or WORKLOAD_BUSY if another operation takes the hold.
        """
        self._require_idle(hold_id)
        self._takers[workload_id] = hold_id

    def prepare_taking(self, workload_id: str, hold_id: str) -> None:
        """As :meth:`begin_taking`, for a hold that may not exist yet or may already be taken."""
        self._takers[workload_id] = hold_id

    def settle(self, workload_id: str, *, done: bool) -> None:
        """Ends the operation of a workload that begins or takes a hold. Without one, nothing happens.

        Args:
            workload_id: The workload.
            done: Whether the operation succeeded. After a success, the taken hold ends. After a failure, the
                begun hold ends. A hold of several suspended workloads continues for the other workloads.
        """
        terms, hold_id = self._terms.pop(workload_id, None), self._takers.pop(workload_id, None)
        if terms is not None and not done and workload_id in self.suspended(terms.hold_id):
            self._leave(workload_id, terms.hold_id)
        if hold_id is not None:
            if done or not self._slots_of(hold_id):
                self._leave(workload_id, hold_id)
            self._changed.set()  # the hold's expiry applies again

    def _leave(self, workload_id: str, hold_id: str) -> None:
        """Ends a hold, unless the workload is one of several that were suspended for it."""
        hold = self._holds.get(hold_id)
        if hold is None:
            return
        others = tuple(suspended for suspended in hold.workload_ids if suspended != workload_id)
        if others and others != hold.workload_ids:
            self._put(replace(hold, workload_ids=others), ())
        else:
            self._end(hold_id)

    def absorb(self, workload_id: str, gpu_uuids: Collection[str]) -> list[str]:
        """Puts GPUs that a workload releases under its hold, and returns the others."""
        terms, hold_id = self._terms.get(workload_id), self._takers.get(workload_id)
        if terms is not None and gpu_uuids:
            hold = self._holds.get(terms.hold_id) or self._begin(terms)
            suspended = tuple(dict.fromkeys((*hold.workload_ids, workload_id)))
            gpus = (*hold.gpu_uuids, *gpu_uuids)
            self._put(replace(hold, workload_ids=suspended, gpu_uuids=gpus), gpu_uuids)
            return []
        if hold_id is not None and hold_id in self._holds:
            hold = self._holds[hold_id]
            self._put(hold, [gpu_uuid for gpu_uuid in gpu_uuids if gpu_uuid in hold.gpu_uuids])
            return [gpu_uuid for gpu_uuid in gpu_uuids if gpu_uuid not in hold.gpu_uuids]
        return list(gpu_uuids)

    def suspended(self, hold_id: str) -> tuple[str, ...]:
        """The workloads that were suspended for a hold. Empty: there is no such hold."""
        return self._holds[hold_id].workload_ids if hold_id in self._holds else ()

    def gpus_of(self, hold_id: str) -> frozenset[str]:
        """The GPUs that are under a hold now. Empty id: none.

        Raises:
            OperationError: UNKNOWN_HOLD.
        """
        if hold_id:
            self._get(hold_id)
        return frozenset(self._slots_of(hold_id))

    def usable(self, hold_id: str, *, allow_foreign: bool) -> list[str]:
        """The GPUs under a hold that a taker can lease, in slot order. Empty id: none.

        Raises:
            OperationError: UNKNOWN_HOLD.
        """
        held = self.gpus_of(hold_id)
        states = (FREE, FOREIGN) if allow_foreign else (FREE,)
        slots = self._slots.snapshot().slots
        return [
            slot.gpu_uuid for slot in slots if slot.gpu_uuid in held and slot.without_lease.state in states
        ]

    def choose(self, hold_id: str, request: GpuRequest, kept: Collection[str]) -> tuple[str, ...] | None:
        """The GPUs that a request gets from a hold, with free ones if these do not suffice. None: too few.

        Args:
            hold_id: The hold.
            request: The request.
            kept: Free GPUs that are reserved for waiting claims.

        Raises:
            OperationError: UNKNOWN_HOLD.
        """
        held = self.gpus_of(hold_id)
        if self._slots.worker_cordon is not None:
            return None
        others = {gpu.uuid for gpu in self._slots.gpus} - held
        alone = self._slots.choose(request, held, others)
        return alone if alone is not None else self._slots.choose(request, held, set(kept) - held)

    def release(self, hold_id: str) -> None:
        """Gives a hold up: its GPUs become free.

        Raises:
            OperationError: UNKNOWN_HOLD, or WORKLOAD_BUSY while an operation takes the hold.
        """
        self._require_idle(hold_id)
        self._end(hold_id)

    def adopt(self, hold: Hold) -> None:
        """Restores a hold with its remaining time after a restart of the worker.

        GPUs that are leased, or that no longer exist, are left out. A change of the wall clock does not
        lengthen the hold beyond its whole duration.
        """
        whole_s = (hold.expire_time - hold.create_time).total_seconds()
        left_s = (hold.expire_time - datetime.now(UTC)).total_seconds()
        self._deadlines[hold.hold_id] = self._clock() + min(max(0.0, left_s), whole_s)
        unleased = self._slots.unleased()
        mine = [gpu_uuid for gpu_uuid in hold.gpu_uuids if gpu_uuid in unleased]
        self._put(hold, mine, since=hold.create_time)

    def expire(self) -> None:
        """Ends the holds whose time is over, unless operations take them."""
        now, taken = self._clock(), set(self._takers.values())
        for hold in self:
            is_empty = not self._slots_of(hold.hold_id)
            if hold.hold_id not in taken and (is_empty or self._deadlines[hold.hold_id] <= now):
                self._end(hold.hold_id)

    async def run(self) -> None:
        """Ends holds at their expiry, until cancelled."""
        while True:
            self.expire()
            taken = set(self._takers.values())
            idle = [self._deadlines[hold.hold_id] for hold in self if hold.hold_id not in taken]
            self._changed = trio.Event()
            with trio.move_on_after(max(0.0, min(idle, default=float("inf")) - self._clock())):
                await self._changed.wait()

    def _begin(self, terms: HoldTerms) -> Hold:
        now = datetime.now(UTC)
        self._deadlines[terms.hold_id] = self._clock() + terms.hold_s
        expire_time = now + timedelta(seconds=terms.hold_s)
        return Hold(terms.hold_id, (), (), now, expire_time, terms.held_by)

    def _put(self, hold: Hold, gpu_uuids: Collection[str], *, since: datetime | None = None) -> None:
        self._holds[hold.hold_id] = hold
        placeholder = Lease(LeaseId(hold.hold_id), "", hold.gpu_uuids, hold.create_time, 0)
        gpus = {*self._slots_of(hold.hold_id), *gpu_uuids}
        self._slots.hold(gpus, placeholder, reserved=True, hold=hold, since=since)
        self._keep(hold.hold_id, hold)
        self._changed.set()

    def _end(self, hold_id: str) -> None:
        if self._holds.pop(hold_id, None) is None:
            return
        del self._deadlines[hold_id]
        self._slots.hold(self._slots_of(hold_id), None)
        self._keep(hold_id, None)
        self._serve()

    def _slots_of(self, hold_id: str) -> list[str]:
        slots = self._slots.snapshot().slots
        return [slot.gpu_uuid for slot in slots if slot.hold is not None and slot.hold.hold_id == hold_id]

    def _get(self, hold_id: str) -> Hold:
        if hold_id not in self._holds:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_HOLD,
                f"there is no hold {hold_id}: it was taken or given up, or it has expired; suspend again, or "
                "leave out the hold",
                {"field": "hold_id"},
            )
        return self._holds[hold_id]

    def _require_idle(self, hold_id: str) -> None:
        self._get(hold_id)
        taker = self.taker_of(hold_id)
        if taker is not None:
            raise OperationError(
                errors_pb2.ERROR_REASON_WORKLOAD_BUSY,
                f"workload {taker} is taking hold {hold_id}: wait for its command, or cancel it",
                {"workload_id": taker},
            )
