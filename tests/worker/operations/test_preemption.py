"""Which helpers have to give their GPUs back for those who wait."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.leases import Cordon, Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.operations.preemption import HelperLease, helpers_to_ask, helpers_would_do, spare_gpus

from tests.examples import PATIENT

ONE, TWO = GpuRequest(1), GpuRequest(2)
A, B = GpuRequest(1, name="A"), GpuRequest(1, name="B")
REPAIR = Cordon("repair", "ann", datetime(2026, 1, 1, tzinfo=UTC))


class Host:
    """A pool with helpers on it, from the oldest to the newest, and claims that wait.

    Args:
        chips: The chip of each GPU.
    """

    def __init__(self, chips: str) -> None:
        self.pool = GpuPool([PoolGpu(str(slot), chip) for slot, chip in enumerate(chips)])
        self.helpers: dict[str, Lease] = {}
        self.asked: set[str] = set()
        self.stubborn: set[str] = set()

    def helper(self, slots: str) -> None:
        """Puts a helper on GPUs. It is known by their slots."""
        self.helpers[slots] = self.pool.claim_gpus(slots, list(slots))

    def hold(self, slots: str) -> Lease:
        return self.pool.claim_gpus("holder", list(slots))

    def to_ask(self) -> list[str]:
        helpers = [
            HelperLease(lease, name in self.asked, name in self.stubborn)
            for name, lease in self.helpers.items()
        ]
        return [lease.workload_id for lease in helpers_to_ask(self.pool, helpers)]

    def would_do(self, request: GpuRequest, priority: int = 0) -> bool:
        return helpers_would_do(self.pool, list(self.helpers.values()), request, priority)


async def ask_for(host: Host, requests: Sequence[GpuRequest], *, helper: bool = False) -> list[str]:
    """Whom these claims ask, in the order in which they come."""
    async with trio.open_nursery() as nursery:
        for number, request in enumerate(requests):

            async def claim(request: GpuRequest = request, number: int = number) -> None:
                await host.pool.claim(f"c{number}", request, helper=helper)

            nursery.start_soon(claim)
            await trio.testing.wait_all_tasks_blocked()
        asked = host.to_ask()
        nursery.cancel_scope.cancel()
    return asked


async def test_helpers_would_not_do_for_a_claim_behind_one_that_waits_for_others() -> None:
    host = Host("AAAAB")
    host.hold("0")
    host.helper("12")
    host.helper("4")
    assert host.would_do(GpuRequest(3, name="A"))
    assert not host.would_do(GpuRequest(4, name="A"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.pool.claim, "waiter", GpuRequest(4, name="A"))
        await trio.testing.wait_all_tasks_blocked()
        assert not host.would_do(A)
        assert host.would_do(B), "the claim does not wait for this GPU"
        assert host.would_do(TWO, priority=1), "it would go first"
        nursery.cancel_scope.cancel()


async def test_helpers_would_do_for_a_claim_with_what_those_before_it_leave() -> None:
    host = Host("AAAA")
    host.helper("0")
    host.helper("123")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.pool.claim, "waiter", TWO)
        await trio.testing.wait_all_tasks_blocked()
        assert host.would_do(TWO)
        assert not host.would_do(GpuRequest(3))
        host.pool.slots.worker_cordon = REPAIR
        assert not host.would_do(ONE)
        nursery.cancel_scope.cancel()


async def test_no_helpers_would_do_where_there_are_none() -> None:
    host = Host("A")
    assert not host.would_do(ONE)


async def test_nobody_is_asked_while_nobody_waits() -> None:
    host = Host("AA")
    host.helper("0")
    assert host.to_ask() == []
    assert await ask_for(host, [ONE]) == [], "one was free"


async def test_the_newest_is_asked_first() -> None:
    host = Host("AAA")
    for slot in "210":
        host.helper(slot)
    assert await ask_for(host, [ONE]) == ["0"]
    assert await ask_for(host, [TWO]) == ["0", "1"]


async def test_no_more_are_asked_than_serve() -> None:
    host = Host("AAAA")
    host.helper("3")
    host.helper("012")
    assert await ask_for(host, [GpuRequest(3)]) == ["012"]
    assert await ask_for(host, [GpuRequest(4)]) == ["012", "3"]


async def test_a_newer_helper_that_is_not_needed_after_all_is_left_alone() -> None:
    host = Host("AAA")
    host.helper("12")
    host.helper("0")
    assert await ask_for(host, [ONE]) == ["0"]
    assert await ask_for(host, [TWO]) == ["12"], "it serves alone, so the other need not go"


async def test_what_is_free_counts_too() -> None:
    host = Host("AAA")
    host.helper("0")
    host.helper("1")
    assert await ask_for(host, [TWO]) == ["1"]


async def test_none_is_asked_where_all_together_would_not_do() -> None:
    host = Host("AAA")
    host.hold("2")
    host.helper("0")
    host.helper("1")
    assert await ask_for(host, [GpuRequest(3)]) == []
    assert await ask_for(host, [GpuRequest(3), ONE]) == [], "nor by those behind it on the same GPUs"


async def test_who_waits_for_others_does_not_keep_those_behind_it_from_other_gpus() -> None:
    host = Host("AABB")
    host.hold("0")
    host.helper("1")
    host.helper("2")
    host.helper("3")
    assert await ask_for(host, [GpuRequest(2, name="A"), B]) == ["3"]


async def test_only_helpers_on_gpus_that_will_do_are_asked() -> None:
    host = Host("AB")
    host.helper("0")
    host.helper("1")
    assert await ask_for(host, [A]) == ["0"]


async def test_one_that_was_asked_counts_as_coming() -> None:
    host = Host("AAA")
    host.hold("2")
    host.helper("0")
    host.helper("1")
    host.asked = {"0"}
    assert await ask_for(host, [ONE]) == []
    assert await ask_for(host, [ONE, ONE]) == ["1"]
    assert await ask_for(host, [TWO]) == ["1"]
    host.asked = {"0", "1"}
    assert await ask_for(host, [ONE, ONE]) == []
    assert await ask_for(host, [ONE, ONE, ONE]) == []


async def test_claims_are_served_in_their_turn() -> None:
    host = Host("AB")
    host.helper("1")
    host.helper("0")
    assert await ask_for(host, [B, ONE]) == ["1", "0"]
    assert await ask_for(host, [A, A, B]) == ["0", "1"], "the second A is not served by B"


async def test_helpers_that_wait_ask_nobody() -> None:
    host = Host("A")
    host.helper("0")
    assert await ask_for(host, [ONE], helper=True) == []


async def test_gpus_that_nobody_gets_are_not_asked_for() -> None:
    host = Host("AA")
    host.helper("0")
    host.helper("1")
    host.pool.slots.cordon("1", REPAIR)
    assert await ask_for(host, [ONE]) == ["0"]
    assert await ask_for(host, [TWO]) == []


async def test_a_cordoned_worker_asks_nobody() -> None:
    host = Host("A")
    host.helper("0")
    host.pool.slots.cordon("", REPAIR)
    assert await ask_for(host, [ONE]) == [], "the claim would not get the GPU"


async def test_nobody_is_asked_for_gpus_that_are_kept_for_who_waits_for_the_rest() -> None:
    host = Host("AAB")
    host.helper("0")
    host.helper("2")
    async with trio.open_nursery() as nursery:
        lacks_memory = partial(host.pool.claim, "a", A, take_host=lambda _: False)
        nursery.start_soon(lacks_memory)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(host.pool.claim, "b", A)
        await trio.testing.wait_all_tasks_blocked()
        assert host.to_ask() == ["0"], "the first keeps the free GPU, and no other"
        nursery.start_soon(host.pool.claim, "c", B)
        await trio.testing.wait_all_tasks_blocked()
        assert host.to_ask() == ["0", "2"], "that it can't use"
        nursery.cancel_scope.cancel()


async def test_helpers_wake_while_nobody_waits_for_gpus_unless_the_worker_is_cordoned() -> None:
    host = Host("AAB")
    host.hold("0")
    assert spare_gpus(host.pool) == 2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.pool.claim, "c", GpuRequest(2, name="A"))
        await trio.testing.wait_all_tasks_blocked()
        assert spare_gpus(host.pool) == 0
        nursery.cancel_scope.cancel()
    host.pool.slots.cordon("", REPAIR)
    assert spare_gpus(host.pool) == 0


async def test_who_waits_for_something_else_or_for_the_impossible_keeps_no_helper_asleep() -> None:
    host = Host("AA")
    host.pool.slots.cordon("1", REPAIR)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.pool.claim, "impossible", TWO)
        nursery.start_soon(
            partial(host.pool.claim, has_host=lambda _: False, take_host=lambda _: False), "poor", ONE
        )
        nursery.start_soon(partial(host.pool.claim, helper=True), "waiting helper", TWO)
        await trio.testing.wait_all_tasks_blocked()
        assert spare_gpus(host.pool) == 1
        host.helper("0")
        assert host.to_ask() == [], "nor is a helper asked for their sake"
        nursery.cancel_scope.cancel()


async def test_a_helper_from_which_nothing_could_be_taken_is_asked_last() -> None:
    host = Host("AA")
    host.helper("0")
    host.helper("1")
    host.stubborn.add("1")
    assert await ask_for(host, [ONE]) == ["0"]
    host.asked.add("1")
    assert await ask_for(host, [ONE]) == ["0"], "it does not count as coming"
    host.asked.clear()
    assert await ask_for(host, [TWO]) == ["0", "1"]


Case = tuple[str, list[str], list[int], list[GpuRequest]]
cases = st.tuples(
    st.sampled_from(["AAAAA", "AABBB", "AAA", "AB"]),
    st.lists(st.sampled_from(["helper", "helper", "asked", "held", "free"]), min_size=5, max_size=5),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.lists(
        st.builds(GpuRequest, st.integers(1, 3), name=st.sampled_from(["", "", "A", "B"])),
        min_size=1,
        max_size=4,
    ),
)


def host_of(case: Case) -> Host:
    chips, roles, groups, _ = case
    host = Host(chips)
    for group in range(3):
        for role in ("helper", "asked", "held"):
            slots = "".join(
                str(slot) for slot in range(len(chips)) if (roles[slot], groups[slot]) == (role, group)
            )
            if slots and role == "held":
                host.hold(slots)
            elif slots:
                host.helper(slots)
                host.asked |= {slots} if role == "asked" else set()
    return host


async def still_waiting(host: Host, requests: Sequence[GpuRequest], asked: Sequence[str] | None) -> int:
    """How many claims wait once helpers have gone.

    Args:
        host: Where.
        requests: What is claimed.
        asked: Who goes, beside those that were asked before. None: all who are asked, until nobody is.
    """
    async with trio.open_nursery() as nursery:
        for number, request in enumerate(requests):
            if sum(map(request.allows, host.pool.slots.gpus)) >= request.count:
                nursery.start_soon(host.pool.claim, f"c{number}", request)
                await trio.testing.wait_all_tasks_blocked()
        going = [*host.asked, *(host.to_ask() if asked is None else asked)]
        while going:
            assert len(set(going)) == len(going), "nobody is asked twice"
            for name in going:
                host.pool.release(host.helpers.pop(name))
            going = host.to_ask() if asked is None else []
        waiting = host.pool.pending_claimers
        if asked is None:
            for lease in host.helpers.values():
                host.pool.release(lease)
            assert host.pool.pending_claimers == waiting, "those who stay could not have served anybody"
        nursery.cancel_scope.cancel()
    return waiting


@pytest.mark.long
@settings(PATIENT, max_examples=200, derandomize=True)
@given(cases)
def test_all_are_served_whom_helpers_can_serve(case: Case) -> None:
    trio.run(still_waiting, host_of(case), case[3], None)


@pytest.mark.long
@settings(PATIENT, max_examples=200, derandomize=True)
@given(cases)
def test_each_that_a_claim_asks_is_needed(case: Case) -> None:
    only = case[3][:1]
    if sum(map(only[0].allows, host_of(case).pool.slots.gpus)) < only[0].count:
        return
    asked = trio.run(ask_for, host_of(case), only)
    if asked:
        assert trio.run(still_waiting, host_of(case), only, asked) == 0
    for name in asked:
        others = [other for other in asked if other != name]
        assert trio.run(still_waiting, host_of(case), only, others) == 1
