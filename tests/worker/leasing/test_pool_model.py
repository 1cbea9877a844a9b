"""The pool against an oracle that is written from the words of its rules, in every order that comes up.

Claims are tasks of a real trio loop, which runs in a thread of its own; each step goes on until all of them
are parked again. The oracle is slow and plain: it tries all sets of GPUs, and starts over after each grant.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from typing import TypeVar

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from leasehold.v1 import gpu_pb2, workload_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.holds import HoldTerms
from leasehold_worker.leasing.host_reservations import HostRequest
from leasehold_worker.leasing.leases import (
    CORDONED,
    FOREIGN,
    FREE,
    LEASED,
    OK,
    RESERVED,
    UNHEALTHY,
    Cordon,
    ForeignProcess,
    Hold,
    Lease,
    LeaseId,
    SlotLease,
    Standing,
)
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.workloads.invariants import hold_violations

from tests import environment

GPUS = [
    PoolGpu("GPU-0", "A", 10, units=1),
    PoolGpu("GPU-1", "A", 20, units=1),
    PoolGpu("GPU-2", "B", 20, units=2),
    PoolGpu("GPU-3", "B", 40, units=4),
]
UUIDS = [gpu.uuid for gpu in GPUS]
REST = 6
LOST, THROTTLED = gpu_pb2.GPU_HEALTH_LOST, gpu_pb2.GPU_HEALTH_THROTTLED
EXCLUDING = {gpu_pb2.GPU_HEALTH_XID_ERROR, LOST}
SAME_AS_BEFORE = workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE
REPAIR = Cordon("repair", "ann", datetime(2026, 1, 1, tzinfo=UTC))
STRANGER = ForeignProcess(4711, "bob", "python", 1)

Result = TypeVar("Result")


# What the rules say.


@dataclass
class ExpectedSlot:
    """What a GPU should be doing. ``holder`` is unique to each lease, and empty under a hold."""

    gpu: PoolGpu
    index: int
    holder: str | None = None
    hold_id: str = ""
    reserved: bool = False
    cordoned: bool = False
    health: gpu_pb2.GpuHealth.ValueType = OK
    foreign: bool = False

    def is_for(self, request: GpuRequest) -> bool:
        """Whether it will do for a request once nobody holds it."""
        return (
            not self.cordoned
            and self.health not in EXCLUDING
            and (request.allow_foreign or not self.foreign)
            and fits(self.gpu, request)
        )

    @property
    def state(self) -> int:
        if self.holder is not None:
            return RESERVED if self.reserved else LEASED
        if self.health in EXCLUDING:
            return UNHEALTHY
        if self.cordoned:
            return CORDONED
        return FOREIGN if self.foreign else FREE


@dataclass(frozen=True)
class ExpectedWaiter:
    holder: str
    request: GpuRequest
    priority: int
    helper: bool
    rest: int


@dataclass
class Oracle:
    """The pool, by the words of its rules."""

    slots: list[ExpectedSlot] = field(
        default_factory=lambda: [ExpectedSlot(g, i) for i, g in enumerate(GPUS)]
    )
    waiters: list[ExpectedWaiter] = field(default_factory=list)
    """In the order in which they came."""
    leases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """GPUs by holder."""
    granted: list[str] = field(default_factory=list)
    """Every holder that ever got something, in that order."""
    rest: int = REST
    cordoned: bool = False
    holds: dict[str, float] = field(default_factory=dict)
    """Ends of the holds, by the pool's clock, in the order in which they began."""

    @property
    def queue(self) -> list[ExpectedWaiter]:
        """By turn: helpers last, the higher priority first, and then first come, first served."""
        by_priority = sorted(self.waiters, key=lambda waiter: -waiter.priority)
        return [w for w in by_priority if not w.helper] + [w for w in by_priority if w.helper]

    def for_claim(self, request: GpuRequest, ahead: Sequence[ExpectedWaiter]) -> tuple[str, ...] | None:
        """The GPUs that a claim gets behind those that wait ahead of it."""
        if self.cordoned:
            return None
        return best(
            request,
            [
                slot
                for slot in self.slots
                if slot.holder is None and slot.is_for(request) and slot.gpu.uuid not in self.kept(ahead)
            ],
        )

    def for_taker(
        self, request: GpuRequest, hold_id: str, ahead: Sequence[ExpectedWaiter]
    ) -> tuple[str, ...] | None:
        """The GPUs that the taker of a hold gets: those of the hold, or else with free ones."""
        if self.cordoned:
            return None
        held = [slot for slot in self.held(hold_id) if slot.is_for(request)]
        free = [
            slot
            for slot in self.slots
            if slot.holder is None and slot.is_for(request) and slot.gpu.uuid not in self.kept(ahead)
        ]
        both = sorted([*held, *free], key=lambda slot: slot.index)
        return best(request, held) or best(request, both)

    def held(self, hold_id: str) -> list[ExpectedSlot]:
        """The GPUs under a hold."""
        return [slot for slot in self.slots if slot.hold_id == hold_id]

    def hold(self, gpu_uuids: Sequence[str], hold_id: str) -> None:
        """Puts free GPUs under a hold."""
        for slot in self.named(gpu_uuids):
            slot.holder, slot.reserved, slot.hold_id = "", True, hold_id

    def end_hold(self, hold_id: str) -> None:
        """Frees the GPUs of a hold, and grants them."""
        del self.holds[hold_id]
        for slot in self.held(hold_id):
            slot.holder, slot.reserved, slot.hold_id = None, False, ""
        self.settle()

    def kept(self, ahead: Sequence[ExpectedWaiter]) -> set[str]:
        """The GPUs that are kept for those that wait.

        While GPUs lack, that is every GPU that could be used. While only the rest lacks, it is the GPUs that
        would be taken.
        """
        kept: set[str] = set()
        for waiter in ahead:
            free = [
                slot
                for slot in self.slots
                if slot.holder is None and slot.is_for(waiter.request) and slot.gpu.uuid not in kept
            ]
            taken = None if self.cordoned else best(waiter.request, free)
            usable = {slot.gpu.uuid for slot in self.slots if self.could_use(waiter.request, slot)}
            kept |= usable if taken is None else set(taken) & usable
        return kept

    def kept_rest(self, ahead: Sequence[ExpectedWaiter]) -> int:
        """What is kept of the rest for those that wait and can ever be granted."""
        slots = self.slots
        return sum(w.rest for w in ahead if any(self.could_use(w.request, slot) for slot in slots))

    def could_use(self, request: GpuRequest, slot: ExpectedSlot) -> bool:
        """Whether a request could be granted with this GPU if every lease ended."""
        usable = [slot for slot in self.slots if slot.is_for(request)]
        return slot in usable and best(request, usable) is not None

    def settle(self) -> None:
        """Grants all that is to be granted."""
        while any(self.grant_to(index, waiter) for index, waiter in enumerate(self.queue)):
            pass

    def grant_to(self, turn: int, waiter: ExpectedWaiter) -> bool:
        queue = self.queue
        if waiter.helper and any(self.holds_back_helpers(other) for other in queue):
            return False
        equals = [other for other in queue[:turn] if other.helper == waiter.helper]
        chosen = self.for_claim(waiter.request, equals)
        if chosen is None or waiter.rest > max(0, self.rest - self.kept_rest(queue[:turn])):
            return False
        self.waiters.remove(waiter)
        self.rest -= waiter.rest
        self.take(waiter.holder, chosen)
        return True

    def holds_back_helpers(self, waiter: ExpectedWaiter) -> bool:
        """Whether it is GPUs, and nothing else, that a claim waits for which is no helper."""
        usable = [slot for slot in self.slots if slot.is_for(waiter.request)]
        ahead = self.queue[: self.queue.index(waiter)]
        has_rest = waiter.rest <= max(0, self.rest - self.kept_rest(ahead))
        return not waiter.helper and has_rest and best(waiter.request, usable) is not None

    def take(self, holder: str, gpu_uuids: Sequence[str], *, reserved: bool = False) -> None:
        self.leases[holder] = tuple(gpu_uuids)
        self.granted.append(holder)
        for slot in self.named(gpu_uuids):
            assert not slot.holder
            slot.holder, slot.reserved, slot.hold_id = holder, reserved, ""

    def free(self, holder: str) -> bool:
        """Frees without granting it to anybody yet."""
        freed = self.leases.pop(holder, None)
        for slot in self.named(freed or ()):
            slot.holder, slot.reserved = None, False
        return freed is not None

    def named(self, gpu_uuids: Sequence[str]) -> list[ExpectedSlot]:
        return [self.slots[UUIDS.index(gpu_uuid)] for gpu_uuid in gpu_uuids]


def fits(gpu: PoolGpu, request: GpuRequest) -> bool:
    if request.name and request.name != gpu.name:
        return False
    if request.gpu_uuids and gpu.uuid not in request.gpu_uuids:
        return False
    if request.acceptable_units and gpu.units not in request.acceptable_units:
        return False
    return (gpu.memory_bytes or 0) >= request.memory_bytes


def best(request: GpuRequest, usable: Sequence[ExpectedSlot]) -> tuple[str, ...] | None:
    """Of all sets that suffice: where units are wanted, that with the fewest; then by preference and slot."""

    def rank(slot: ExpectedSlot) -> tuple[bool, int]:
        liked = request.preference != SAME_AS_BEFORE or slot.gpu.uuid in request.preferred
        return (not liked, slot.index)

    sets = [
        (sum(slot.gpu.units for slot in chosen) if request.units else 0, sorted(chosen, key=rank))
        for chosen in combinations(usable, request.count)
        if sum(slot.gpu.units for slot in chosen) >= request.units
    ]
    if not sets:
        return None
    _, chosen = min(sets, key=lambda entry: (entry[0], [rank(slot) for slot in entry[1]]))
    return tuple(slot.gpu.uuid for slot in chosen)


def possible(request: GpuRequest) -> bool:
    """Whether the pool could ever grant it."""
    return best(request, [ExpectedSlot(g, i) for i, g in enumerate(GPUS) if fits(g, request)]) is not None


# What is tried.

some_gpus = st.lists(st.sampled_from(UUIDS), unique=True, max_size=3).map(tuple)
named_gpus = st.lists(st.sampled_from(UUIDS), unique=True, min_size=1, max_size=3).map(tuple)
plain_requests = st.builds(GpuRequest, st.sampled_from([1, 1, 1, 2, 2, 3, 4]))
choosy_requests = st.builds(
    GpuRequest,
    st.integers(1, 3),
    memory_bytes=st.sampled_from([0, 0, 20]),
    name=st.sampled_from(["", "", "A", "B"]),
    gpu_uuids=some_gpus,
    units=st.sampled_from([0, 0, 2, 4]),
    acceptable_units=st.sampled_from([frozenset[int](), frozenset({1, 2})]),
    preference=st.sampled_from([workload_pb2.GPU_PREFERENCE_UNSPECIFIED, SAME_AS_BEFORE]),
    preferred=some_gpus,
    allow_foreign=st.booleans(),
)
chip_requests = st.builds(GpuRequest, st.sampled_from([1, 2]), name=st.sampled_from(["A", "B"]))
requests = plain_requests | choosy_requests
priorities = st.sampled_from([0, 0, 0, 1, 5])
waiters = st.builds(
    ExpectedWaiter,
    st.just(""),
    plain_requests | chip_requests | choosy_requests.filter(possible),
    priorities,
    st.sampled_from([False, False, False, True]),
    st.integers(0, 3),
)
picks = st.integers(0, 40)
seldom = st.sampled_from([False, False, False, True])


@dataclass(eq=False)
class Claimant:
    """Somebody who waits for GPUs, or has waited."""

    expected: ExpectedWaiter
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    has_rest: bool = False
    lease: Lease | None = None
    over: bool = False


@dataclass(eq=False)
class Loop:
    """A trio loop in a thread, and a nursery in it."""

    token: trio.lowlevel.TrioToken | None = None
    nursery: trio.Nursery | None = None
    ready: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=trio.run, args=(self.main,), daemon=True)
        self.thread.start()
        self.ready.wait()

    async def main(self) -> None:
        async with trio.open_nursery() as nursery:
            self.token, self.nursery = trio.lowlevel.current_trio_token(), nursery
            self.ready.set()
            await trio.sleep_forever()

    def do(self, act: Callable[[], Result]) -> Result:
        """Acts within the loop, and returns once all tasks are parked again."""

        async def step() -> Result:
            result = act()
            await trio.testing.wait_all_tasks_blocked()
            return result

        return trio.from_thread.run(step, trio_token=self.token)

    def end(self) -> None:
        assert self.nursery is not None
        trio.from_thread.run_sync(self.nursery.cancel_scope.cancel, trio_token=self.token)
        self.thread.join()


class SpawnError(Exception):
    """An operation that begins or takes a hold fails."""


class PoolMachine(RuleBasedStateMachine):
    """Many claim, cancel and release; operators, the health monitor and strangers interfere."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, Standing] = {}
        self.kept_holds: dict[str, Hold | None] = {}
        self.now_s = 0.0
        self.pool = GpuPool(
            GPUS, self.told.__setitem__, keep_hold=self.kept_holds.__setitem__, clock=lambda: self.now_s
        )
        self.oracle = Oracle()
        self.rest = REST
        self.claimants: list[Claimant] = []
        self.leases: list[Lease] = []
        """Every lease that there ever was, but those of claimants that were cancelled as they got it."""
        self.gave_rest: set[str] = set()
        self.adopted: set[str] = set()
        self.numbers = 0
        self.before: tuple[int, object] = (-1, None)
        self.loop = Loop()

    def teardown(self) -> None:
        self.loop.end()
        assert self.pool.pending_claimers == 0
        assert not self.pool.waiting

    def new_name(self, kind: str) -> str:
        self.numbers += 1
        return f"{kind}{self.numbers}"

    def do(self, act: Callable[[], Result]) -> Result:
        return self.loop.do(act)

    # Claims that wait.

    async def run_claimant(self, claimant: Claimant) -> None:
        expected = claimant.expected

        def has_rest(kept: HostRequest) -> bool:
            return expected.rest <= max(0, self.rest - kept.cpu_millicores)

        def take_rest(kept: HostRequest) -> bool:
            if not has_rest(kept):
                return False
            assert not claimant.has_rest, "the rest is taken once"
            self.rest -= expected.rest
            claimant.has_rest = True
            return True

        try:
            with claimant.scope:
                try:
                    claimant.lease = await self.pool.claim(
                        expected.holder,
                        expected.request,
                        priority=expected.priority,
                        helper=expected.helper,
                        host=HostRequest(cpu_millicores=expected.rest),
                        has_host=has_rest,
                        take_host=take_rest,
                    )
                except trio.Cancelled:
                    if claimant.has_rest:
                        self.rest += expected.rest
                        claimant.has_rest = False
                        self.pool.serve()
                    raise
                assert claimant.lease is not None
                assert claimant.has_rest
                self.leases.append(claimant.lease)
        finally:
            claimant.over = True

    def begin(self, claimant: Claimant) -> None:
        assert self.loop.nursery is not None
        self.loop.nursery.start_soon(self.run_claimant, claimant)

    @initialize(held=st.sampled_from([4, 4, 3, 0]), wanted=st.lists(waiters, min_size=2, max_size=6))
    def begin_with_a_queue(self, held: int, wanted: list[ExpectedWaiter]) -> None:
        """Others were there before, so that claims have to wait."""
        for _ in range(held):
            self.try_claim(GpuRequest(1), 0)
        self.claim(wanted)

    @precondition(lambda self: len(self.oracle.waiters) < 8)
    @rule(wanted=st.lists(waiters, min_size=1, max_size=4))
    def claim(self, wanted: list[ExpectedWaiter]) -> None:
        for waiter in wanted:
            claimant = Claimant(replace(waiter, holder=self.new_name("c")))
            self.claimants.append(claimant)
            self.do(partial(self.begin, claimant))
            self.oracle.waiters.append(claimant.expected)
            self.oracle.settle()

    @precondition(lambda self: len(self.oracle.waiters) < 3)
    @rule(request=plain_requests, wanted=st.lists(waiters, min_size=2, max_size=5))
    def claim_the_same(self, request: GpuRequest, wanted: list[ExpectedWaiter]) -> None:
        """Equal claims, so that only their turns tell them apart."""
        self.claim([replace(waiter, request=request) for waiter in wanted])

    @rule(waiter=waiters)
    def claim_that_is_cancelled_at_once(self, waiter: ExpectedWaiter) -> None:
        claimant = Claimant(replace(waiter, holder=self.new_name("c")))
        claimant.scope.cancel()
        before, is_alone = self.without_since(), not self.oracle.waiters
        self.do(lambda: self.begin(claimant))
        assert claimant.over
        assert claimant.lease is None
        assert self.without_since() == before or not is_alone, "no trace is left"
        # It may have had them for a moment, which shows in the order of grants. A claim that waits for GPUs
        # alone may then lack host resources too, and holds back no preemptible workload.
        self.oracle.waiters.append(claimant.expected)
        self.oracle.settle()
        self.expect_gone(claimant)

    @precondition(lambda self: self.oracle.waiters)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        claimant = self.a_waiting(pick)
        self.do(claimant.scope.cancel)
        self.expect_gone(claimant)

    @precondition(lambda self: self.oracle.waiters and self.leases)
    @rule(pick=picks, which=picks)
    def cancel_in_the_same_step_as_a_release(self, pick: int, which: int) -> None:
        """The waiter may be granted after it was cancelled, and before it runs."""
        claimant, lease = self.a_waiting(pick), self.a_lease(which)

        def both() -> None:
            claimant.scope.cancel()
            self.give_back(lease)

        self.do(both)
        self.expect_release(lease)
        self.expect_gone(claimant)
        assert claimant.lease is None

    @precondition(lambda self: self.oracle.waiters and self.leases)
    @rule(pick=picks, which=picks)
    def cancel_in_the_same_step_after_a_release(self, pick: int, which: int) -> None:
        """Who was granted before it was cancelled has its lease: trio stops it at its next checkpoint."""
        claimant, lease = self.a_waiting(pick), self.a_lease(which)

        def both() -> None:
            self.give_back(lease)
            claimant.scope.cancel()

        self.do(both)
        self.expect_release(lease)
        if claimant.expected in self.oracle.waiters:
            self.expect_gone(claimant)
        else:
            assert claimant.lease is not None

    def a_waiting(self, pick: int) -> Claimant:
        waiting = [claimant for claimant in self.claimants if claimant.expected in self.oracle.waiters]
        return waiting[pick % len(waiting)]

    def expect_gone(self, claimant: Claimant) -> None:
        assert claimant.over
        if claimant.expected in self.oracle.waiters:
            self.oracle.waiters.remove(claimant.expected)
            self.oracle.settle()
            return
        assert self.oracle.free(claimant.expected.holder)
        self.oracle.settle()
        self.oracle.rest += claimant.expected.rest
        self.oracle.settle()

    def expect_impossible(self, request: GpuRequest) -> None:
        for refuse in (self.pool.preview, self.pool.slots.check_possible):
            with pytest.raises(OperationError):
                refuse(request)
        with pytest.raises(OperationError):
            trio.run(self.pool.claim, "nobody", request)

    # Leases.

    def a_lease(self, pick: int) -> Lease:
        return self.leases[-1 - pick % len(self.leases)]

    def give_back(self, lease: Lease) -> bool:
        """Releases a lease and, as its allocation does, what else came with it."""
        done = self.pool.release(lease)
        for claimant in self.claimants:
            if claimant.lease is lease and claimant.has_rest:
                self.rest += claimant.expected.rest
                claimant.has_rest = False
                self.pool.serve()
        return done

    def expect_release(self, lease: Lease) -> bool:
        rest = [claimant.expected.rest for claimant in self.claimants if claimant.lease is lease]
        live = self.oracle.free(lease.workload_id)
        self.oracle.settle()
        if rest and lease.workload_id not in self.gave_rest:
            self.gave_rest.add(lease.workload_id)
            self.oracle.rest += rest[0]
            self.oracle.settle()
        return live

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        lease = self.a_lease(pick)
        done = self.do(lambda: self.give_back(lease))
        assert done == self.expect_release(lease)

    @rule(request=requests, priority=priorities)
    def try_claim(self, request: GpuRequest, priority: int) -> None:
        if not possible(request):
            self.expect_impossible(request)
            return
        holder = self.new_name("t")
        ahead = [w for w in self.oracle.queue if not w.helper and w.priority >= priority]
        expected = self.oracle.for_claim(request, ahead)
        pending = self.pool.pending_claimers
        assert self.pool.preview(request, priority=priority) == expected
        lease = self.do(lambda: self.pool.try_claim(holder, request, priority=priority))
        assert (lease.gpu_uuids if lease is not None else None) == expected
        assert self.pool.pending_claimers == pending
        if lease is not None:
            self.leases.append(lease)
            self.oracle.take(holder, lease.gpu_uuids)

    @rule(
        gpu_uuids=named_gpus,
        how=st.sampled_from(["claim", "reserve", "occupy"]),
        allow_foreign=st.booleans(),
        reserved=st.booleans(),
    )
    def take_named(self, gpu_uuids: tuple[str, ...], how: str, allow_foreign: bool, reserved: bool) -> None:
        slots = self.oracle.named(gpu_uuids)
        if how == "occupy":
            allowed = all(slot.holder is None for slot in slots)
        else:
            good = {FREE, FOREIGN} if allow_foreign else {FREE}
            allowed = not self.oracle.cordoned and all(slot.state in good for slot in slots)
        holder = self.new_name("n")

        def take() -> Lease:
            match how:
                case "claim":
                    return self.pool.claim_gpus(holder, gpu_uuids, allow_foreign=allow_foreign)
                case "reserve":
                    return self.pool.reserve_gpus(holder, gpu_uuids, allow_foreign=allow_foreign)
                case _:
                    return self.pool.occupy(holder, gpu_uuids, reserved=reserved)

        if not allowed:
            with pytest.raises(OperationError):
                self.do(take)
            return
        lease = self.do(take)
        assert lease.gpu_uuids == gpu_uuids
        self.leases.append(lease)
        self.oracle.take(holder, gpu_uuids, reserved=how == "reserve" or (how == "occupy" and reserved))

    @rule(gpu_uuids=named_gpus, later=st.integers(0, 3), reserved=st.booleans())
    def adopt(self, gpu_uuids: tuple[str, ...], later: int, reserved: bool) -> None:
        """A lease of an earlier start, of which some GPUs may be somebody else's by now, or gone."""
        holder = self.new_name("a")
        token = max([0, *(lease.fencing_token for lease in self.leases)]) + later
        lease = Lease(LeaseId(f"l-{holder}"), holder, ("GPU-gone", *gpu_uuids), datetime.now(UTC), token)
        mine = tuple(slot.gpu.uuid for slot in self.oracle.named(gpu_uuids) if slot.holder is None)
        adopted = self.do(lambda: self.pool.adopt(lease, reserved=reserved))
        assert adopted.gpu_uuids == mine
        self.adopted.add(holder)
        self.leases.append(lease)  # as the journal has it
        if mine:
            self.oracle.take(holder, mine, reserved=reserved)
        else:
            self.oracle.granted.append(holder)
        again = self.do(lambda: self.pool.adopt(lease))
        assert again.gpu_uuids == ()

    @precondition(lambda self: self.leases)
    @rule(first=picks, second=picks, wanted=st.lists(some_gpus, max_size=3))
    def reassign(self, first: int, second: int, wanted: list[tuple[str, ...]]) -> None:
        given_up = [self.a_lease(first), self.a_lease(second)]
        had = {gpu for lease in given_up for gpu in self.oracle.leases.get(lease.workload_id, ())}
        pairs = [(self.new_name("m"), gpu_uuids) for gpu_uuids in wanted]
        leases = self.do(lambda: self.pool.reassign(given_up, pairs))
        for lease in given_up:
            self.oracle.free(lease.workload_id)
        for holder, gpu_uuids in pairs:
            mine = tuple(gpu for gpu in gpu_uuids if gpu in had)
            had -= set(mine)
            assert (leases[holder].gpu_uuids if holder in leases else ()) == mine
            if mine:
                self.oracle.take(holder, mine)
        self.oracle.settle()
        self.leases += leases.values()

    # Holds.

    @precondition(lambda self: self.leases)
    @rule(pick=picks, hold_s=st.sampled_from([1.0, 2.0, 5.0]), fails=seldom)
    def suspend_with_a_hold(self, pick: int, hold_s: float, fails: bool) -> None:
        lease, hold_id = self.a_lease(pick), self.new_name("h")
        gpu_uuids = self.oracle.leases.get(lease.workload_id, ())

        def suspend() -> None:
            holds = self.pool.holds
            with suppress(SpawnError), holds.begun_by(lease.workload_id, HoldTerms(hold_id, hold_s)):
                self.give_back(lease)
                if fails:
                    raise SpawnError

        self.do(suspend)
        if gpu_uuids:
            self.oracle.free(lease.workload_id)
            self.oracle.hold(gpu_uuids, hold_id)
            self.oracle.holds[hold_id] = self.now_s + hold_s
        self.expect_release(lease)
        if gpu_uuids and fails:
            self.oracle.end_hold(hold_id)

    @precondition(lambda self: self.oracle.holds)
    @rule(pick=picks, request=plain_requests | choosy_requests.filter(possible), fails=seldom)
    def take_a_hold(self, pick: int, request: GpuRequest, fails: bool) -> None:
        hold_id, holder = self.a_hold(pick), self.new_name("k")
        ahead = [w for w in self.oracle.queue if not w.helper and w.priority >= 0]
        expected = self.oracle.for_taker(request, hold_id, ahead)
        taken: list[Lease] = []

        def take() -> None:
            with suppress(SpawnError), self.pool.holds.taken_by(holder, hold_id):
                lease = self.pool.try_claim(holder, request, hold_id=hold_id)
                assert (lease.gpu_uuids if lease is not None else None) == expected
                self.now_s += 1
                self.pool.holds.expire()
                if lease is None:
                    raise SpawnError
                if fails:
                    self.pool.release(lease)
                    raise SpawnError
                taken.append(lease)

        self.do(take)
        if taken:
            self.leases += taken
            self.oracle.take(holder, taken[0].gpu_uuids)
        for other in [other for other, end_s in self.oracle.holds.items() if end_s <= self.now_s]:
            if other != hold_id:
                self.oracle.end_hold(other)
        if taken:
            self.oracle.end_hold(hold_id)
        self.pass_time(0)

    @precondition(lambda self: self.oracle.holds)
    @rule(pick=picks)
    def release_a_hold(self, pick: int) -> None:
        hold_id = self.a_hold(pick)
        self.do(lambda: self.pool.holds.release(hold_id))
        self.oracle.end_hold(hold_id)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(self.pool.holds.expire)
        for hold_id in [hold_id for hold_id, end_s in self.oracle.holds.items() if end_s <= self.now_s]:
            self.oracle.end_hold(hold_id)

    def a_hold(self, pick: int) -> str:
        hold_ids = list(self.oracle.holds)
        return hold_ids[pick % len(hold_ids)]

    # What others do.

    @rule(gpu_uuid=st.sampled_from(UUIDS), cordoned=seldom)
    def cordon(self, gpu_uuid: str, cordoned: bool) -> None:
        self.do(lambda: self.pool.slots.cordon(gpu_uuid, REPAIR if cordoned else None))
        self.oracle.named([gpu_uuid])[0].cordoned = cordoned
        self.oracle.settle()

    @rule(cordoned=st.booleans())
    def cordon_worker(self, cordoned: bool) -> None:
        self.do(lambda: self.pool.slots.cordon("", REPAIR if cordoned else None))
        self.oracle.cordoned = cordoned
        self.oracle.settle()

    @rule(gpu_uuid=st.sampled_from(UUIDS), health=st.sampled_from([OK, OK, THROTTLED, *sorted(EXCLUDING)]))
    def find_health(self, gpu_uuid: str, health: gpu_pb2.GpuHealth.ValueType) -> None:
        self.do(lambda: self.pool.slots.set_health(gpu_uuid, health, "as found"))
        slot = self.oracle.named([gpu_uuid])[0]
        if slot.health not in EXCLUDING or health == LOST:
            slot.health = health
        self.oracle.settle()

    @rule(gpu_uuids=st.lists(st.sampled_from(UUIDS), unique=True))
    def reset_health(self, gpu_uuids: list[str]) -> None:
        for gpu_uuid in gpu_uuids:
            self.do(partial(self.pool.slots.reset_health, gpu_uuid))
            self.oracle.named([gpu_uuid])[0].health = OK
            self.oracle.settle()

    @rule(seen=st.dictionaries(st.sampled_from(UUIDS), seldom))
    def observe(self, seen: dict[str, bool]) -> None:
        foreign = {gpu_uuid: (STRANGER,) if there else () for gpu_uuid, there in seen.items()}
        self.do(lambda: self.pool.slots.observe({**foreign, "GPU-gone": (STRANGER,)}, {}))
        for gpu_uuid, there in seen.items():
            self.oracle.named([gpu_uuid])[0].foreign = there
        self.oracle.settle()

    @rule(more=st.integers(-4, 4))
    def change_rest(self, more: int) -> None:
        """Others take of what else is wanted, or give it back."""

        def change() -> None:
            self.rest = max(0, self.rest + more)
            self.pool.serve()

        self.do(change)
        self.oracle.rest = max(0, self.oracle.rest + more)
        self.oracle.settle()

    # What always holds.

    @invariant()
    def every_slot_is_as_expected(self) -> None:
        slots = self.pool.slots.snapshot().slots
        assert [slot.gpu_uuid for slot in slots] == UUIDS
        assert [slot.slot for slot in slots] == list(range(len(UUIDS)))
        found = [(slot.state, slot.lease.workload_id if slot.lease else None) for slot in slots]
        assert found == [(slot.state, slot.holder) for slot in self.oracle.slots]
        assert [slot.standing.health for slot in slots] == [slot.health for slot in self.oracle.slots]
        for slot in slots:
            assert self.told.get(slot.gpu_uuid, Standing()) == slot.standing, "what is kept is what is so"
        assert (self.pool.slots.worker_cordon is not None) == self.oracle.cordoned

    @invariant()
    def leases_and_slots_agree(self) -> None:
        """Nothing is lost and nothing is in two leases: each lease's GPUs are the slots that name it."""
        held: dict[str, set[str]] = {}
        for slot in self.pool.slots.snapshot().slots:
            if slot.lease is not None and slot.hold is None:
                held.setdefault(slot.lease.workload_id, set()).add(slot.gpu_uuid)
                assert slot.gpu_uuid in slot.lease.gpu_uuids
        assert held == {holder: set(gpu_uuids) for holder, gpu_uuids in self.oracle.leases.items()}
        for claimant in self.claimants:
            if claimant.lease is not None and claimant.lease.workload_id in self.oracle.leases:
                assert claimant.lease.gpu_uuids == self.oracle.leases[claimant.lease.workload_id]

    @invariant()
    def holds_and_slots_agree(self) -> None:
        assert not list(hold_violations(self.pool))
        assert {hold.hold_id for hold in self.pool.holds} == set(self.oracle.holds)
        kept = {hold_id: hold for hold_id, hold in self.kept_holds.items() if hold is not None}
        assert kept == {hold.hold_id: hold for hold in self.pool.holds}
        held = {slot.gpu_uuid: slot.hold.hold_id for slot in self.pool.slots.snapshot().slots if slot.hold}
        assert held == {slot.gpu.uuid: slot.hold_id for slot in self.oracle.slots if slot.hold_id}

    @invariant()
    def those_wait_who_should(self) -> None:
        assert [waiter.workload_id for waiter in self.pool.waiting] == [w.holder for w in self.oracle.queue]
        assert self.pool.pending_claimers == sum(not waiter.helper for waiter in self.oracle.waiters)
        running = {claimant.expected.holder for claimant in self.claimants if not claimant.over}
        assert running == {waiter.holder for waiter in self.oracle.waiters}, "who was granted has been woken"
        assert self.rest == self.oracle.rest

    @invariant()
    def tokens_grow_in_the_order_of_grants(self) -> None:
        tokens = {lease.workload_id: lease.fencing_token for lease in self.leases}
        greatest = 0
        for holder in self.oracle.granted:
            token = tokens.get(holder, greatest + 1)
            assert token > greatest or holder in self.adopted
            greatest = max(greatest, token)
        assert len({lease.lease_id for lease in self.leases}) == len(self.leases)

    @invariant()
    def the_revision_grows_with_each_change(self) -> None:
        revision = self.pool.slots.snapshot().revision
        now = (self.without_since(), tuple(waiter.workload_id for waiter in self.pool.waiting))
        before_revision, before = self.before
        assert revision > before_revision or (revision == before_revision and now == before)
        self.before = (revision, now)

    def without_since(self) -> tuple[tuple[object, ...], ...]:
        """All that is known of the slots but when it came about."""

        def facts(slot: SlotLease) -> tuple[object, ...]:
            return (slot.gpu_uuid, slot.lease, slot.reserved, slot.standing, slot.foreign)

        return tuple(map(facts, self.pool.slots.snapshot().slots))


SETTINGS = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_a_claim_that_is_cancelled_at_once_may_let_a_preemptible_workload_pass() -> None:
    machine = PoolMachine()
    try:
        for _ in range(len(GPUS)):
            machine.try_claim(GpuRequest(1), 0)
        waiting = ExpectedWaiter("", GpuRequest(2), priority=0, helper=False, rest=REST)
        machine.claim([waiting, ExpectedWaiter("", GpuRequest(1), priority=0, helper=True, rest=0)])
        machine.reassign(0, 0, [])
        assert [waiter.helper for waiter in machine.oracle.waiters] == [False, True]
        hasty = ExpectedWaiter("", GpuRequest(1), priority=1, helper=False, rest=1)
        machine.claim_that_is_cancelled_at_once(hasty)
        assert [waiter.helper for waiter in machine.oracle.waiters] == [False]
        machine.those_wait_who_should()
        machine.every_slot_is_as_expected()
    finally:
        machine.loop.end()


@pytest.mark.long
def test_the_pool_agrees_with_its_model() -> None:
    run_machine(PoolMachine, settings=SETTINGS)


@pytest.mark.long
@pytest.mark.minutes
def test_the_pool_agrees_with_its_model_in_a_large_sample() -> None:
    run_machine(seed(environment.seed())(PoolMachine), settings=settings(SETTINGS, max_examples=750))
