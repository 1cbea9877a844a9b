"""The pool's behaviour, one test each: that of the pool it grows out of, and what goes beyond."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import trio
import trio.testing
from leasehold.v1 import errors_pb2, gpu_pb2, workload_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.host_reservations import HostRequest
from leasehold_worker.leasing.leases import (
    CORDONED,
    FOREIGN,
    FREE,
    LEASED,
    RESERVED,
    UNHEALTHY,
    Cordon,
    ForeignProcess,
    Lease,
    LeaseId,
    LeaseSnapshot,
    Standing,
)
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.leasing.slots import GpuSlots

UUIDS = [f"GPU-{index:08d}-0000-0000-0000-000000000000" for index in range(4)]
ONE, TWO, THREE = GpuRequest(1), GpuRequest(2), GpuRequest(3)
REPAIR = Cordon("repair", "ann", datetime(2026, 1, 1, tzinfo=UTC))
STRANGER = ForeignProcess(4711, "bob", "python train.py", 2**30)
XID = gpu_pb2.GPU_HEALTH_XID_ERROR
Reason = errors_pb2.ErrorReason


def pool_of(count: int) -> GpuPool:
    return GpuPool([PoolGpu(uuid) for uuid in UUIDS[:count]])


def states(pool: GpuPool) -> list[int]:
    return [slot.state for slot in pool.slots.snapshot().slots]


def holders(pool: GpuPool) -> list[str | None]:
    return [slot.lease.workload_id if slot.lease else None for slot in pool.slots.snapshot().slots]


def must(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def refusal(act: Callable[[], object]) -> OperationError:
    with pytest.raises(OperationError) as refused:
        act()
    return refused.value


class Claims:
    """Claims that wait, each in a task, in the order in which they are made."""

    def __init__(self, pool: GpuPool, nursery: trio.Nursery) -> None:
        self._pool = pool
        self._nursery = nursery
        self.granted: list[str] = []
        self.leases: dict[str, Lease] = {}
        self.scopes: dict[str, trio.CancelScope] = {}

    async def add(
        self,
        name: str,
        request: GpuRequest = ONE,
        *,
        priority: int = 0,
        helper: bool = False,
        take_host: Callable[[HostRequest], bool] = lambda _: True,
    ) -> None:
        scope = self.scopes[name] = trio.CancelScope()

        async def claim() -> None:
            with scope:
                lease = must(
                    await self._pool.claim(
                        name, request, priority=priority, helper=helper, take_host=take_host
                    )
                )
                self.granted.append(name)
                self.leases[name] = lease

        self._nursery.start_soon(claim)
        await trio.testing.wait_all_tasks_blocked()

    async def release(self, lease: Lease) -> None:
        self._pool.release(lease)
        await trio.testing.wait_all_tasks_blocked()

    def cancel(self) -> None:
        self._nursery.cancel_scope.cancel()


# Slots, and what claims get.


def test_slots_keep_the_order_of_the_gpus() -> None:
    reverse = [PoolGpu(uuid) for uuid in reversed(UUIDS)]
    pool = GpuPool(reverse)
    assert [slot.gpu_uuid for slot in pool.slots.snapshot().slots] == UUIDS[::-1]
    assert [slot.slot for slot in pool.slots.snapshot().slots] == [0, 1, 2, 3]
    assert pool.slots.gpus == tuple(reverse)
    assert must(pool.try_claim("a", ONE)).gpu_uuids == (UUIDS[3],)


def test_capacity_is_the_number_of_gpus_whatever_they_do() -> None:
    pool = pool_of(3)
    pool.try_claim("a", ONE)
    pool.slots.cordon(UUIDS[1], REPAIR)
    assert len(pool.slots.gpus) == 3


async def test_claim_on_a_cpu_host_is_none_at_once() -> None:
    pool = pool_of(0)
    with trio.fail_after(10):
        assert await pool.claim("w", ONE) is None
    assert pool.try_claim("w", ONE) is None
    assert pool.preview(ONE) is None
    assert len(pool.slots.gpus) == 0
    assert pool.pending_claimers == 0
    assert pool.slots.snapshot() == LeaseSnapshot(0, ())


async def test_claim_on_a_cpu_host_is_a_checkpoint() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await pool_of(0).claim("w", ONE)
    assert scope.cancelled_caught


async def test_a_claim_of_a_free_gpu_does_not_wait() -> None:
    pool = pool_of(1)
    with trio.fail_after(10):
        lease = must(await pool.claim("w", ONE))
    assert (lease.workload_id, lease.gpu_uuids) == ("w", (UUIDS[0],))
    assert lease.grant_time <= datetime.now(UTC)
    assert pool.pending_claimers == 0


async def test_the_lowest_free_slot_wins() -> None:
    pool = pool_of(3)
    first, second = must(await pool.claim("a", ONE)), must(await pool.claim("b", ONE))
    assert (first.gpu_uuids, second.gpu_uuids) == ((UUIDS[0],), (UUIDS[1],))
    pool.release(first)
    assert must(await pool.claim("c", ONE)).gpu_uuids == (UUIDS[0],)


async def test_a_claim_of_several_gpus_is_all_or_nothing() -> None:
    pool = pool_of(3)
    held = must(pool.try_claim("holder", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", THREE)
        assert states(pool) == [LEASED, FREE, FREE]
        await claims.release(held)
    assert claims.leases["large"].gpu_uuids == tuple(UUIDS[:3])


@pytest.mark.parametrize("count", [0, -1, 4])
async def test_a_count_that_can_never_be_granted_is_refused(count: int) -> None:
    pool = pool_of(3)
    with pytest.raises(OperationError) as error:
        await pool.claim("a", GpuRequest(count))
    assert error.value.reason == Reason.ERROR_REASON_NO_FREE_GPU
    assert error.value.metadata == {"field": "gpu_count"}
    assert pool.pending_claimers == 0
    assert refusal(lambda: pool.try_claim("a", GpuRequest(count))).reason == error.value.reason


async def test_a_claim_among_gpus_that_are_not_there_is_refused() -> None:
    pool = pool_of(1)
    with pytest.raises(OperationError) as error:
        await pool.claim("a", GpuRequest(1, gpu_uuids=("GPU-nowhere",)))
    assert error.value.reason == Reason.ERROR_REASON_UNKNOWN_GPU


# Whose turn it is.


async def test_claims_wait_in_order() -> None:
    pool = pool_of(1)
    held = must(pool.try_claim("holder", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        for count, name in enumerate(["first", "second", "third"], start=1):
            await claims.add(name)
            assert pool.pending_claimers == count
        for count, name in enumerate(["first", "second", "third"], start=1):
            await claims.release(held)
            held = claims.leases[name]
            assert claims.granted == ["first", "second", "third"][:count]
            assert pool.pending_claimers == 3 - count


async def test_the_higher_priority_goes_first_and_equals_in_order() -> None:
    pool = pool_of(1)
    held = must(pool.try_claim("holder", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        for name, priority in (("low", 0), ("high", 5), ("high too", 5), ("negative", -1), ("low too", 0)):
            await claims.add(name, priority=priority)
        for _ in range(5):
            await claims.release(held)
            held = claims.leases[claims.granted[-1]]
    assert claims.granted == ["high", "high too", "low", "low too", "negative"]


async def test_a_large_claim_is_not_starved_by_small_ones() -> None:
    pool = pool_of(2)
    first, second = must(pool.try_claim("a", ONE)), must(pool.try_claim("b", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO)
        await claims.add("small")
        await claims.release(first)
        assert claims.granted == []
        await claims.release(second)
        assert claims.granted == ["large"]
        await claims.release(claims.leases["large"])
    assert claims.granted == ["large", "small"]


async def test_a_small_claim_is_not_held_up_on_gpus_that_the_large_one_can_not_use() -> None:
    pool = GpuPool([PoolGpu(UUIDS[0], "A"), PoolGpu(UUIDS[1], "A"), PoolGpu(UUIDS[2], "B")])
    pool.claim_gpus("holder", [UUIDS[0]])
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", GpuRequest(2, name="A"))
        await claims.add("small")
        assert claims.leases["small"].gpu_uuids == (UUIDS[2],)
        claims.cancel()


async def test_what_could_not_be_granted_if_all_leases_ended_holds_up_nobody() -> None:
    pool = pool_of(2)
    pool.slots.cordon(UUIDS[0], REPAIR)
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO)
        await claims.add("small")
        assert claims.leases["small"].gpu_uuids == (UUIDS[1],)
        claims.cancel()


async def test_helpers_get_nothing_while_anybody_else_waits() -> None:
    pool = pool_of(2)
    held = must(pool.try_claim("holder", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO)
        await claims.add("helper", priority=9, helper=True)
        assert pool.pending_claimers == 1, "helpers are not counted"
        assert [waiter.workload_id for waiter in pool.waiting] == ["large", "helper"]
        await claims.release(held)
        assert claims.granted == ["large"]
        await claims.release(claims.leases["large"])
    assert claims.granted == ["large", "helper"]


async def test_a_helper_gets_what_nobody_waits_for() -> None:
    pool = pool_of(1)
    lease = must(await pool.claim("helper", ONE, helper=True))
    assert lease.gpu_uuids == (UUIDS[0],)


async def test_the_rest_is_taken_in_the_same_step_as_the_grant() -> None:
    pool = pool_of(1)
    there = False
    asked: list[list[int]] = []

    def take_host(_: HostRequest) -> bool:
        asked.append(states(pool))
        return there

    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("w", take_host=take_host)
        await claims.add("behind")
        assert asked == [[FREE], [FREE]], "nothing is held while it is asked for"
        assert pool.pending_claimers == 2, "the GPU is kept for the first"
        there = True
        pool.serve()
        await trio.testing.wait_all_tasks_blocked()
        assert claims.granted == ["w"]
        assert holders(pool) == ["w"]
        claims.cancel()


# Cancellation and deadlines.


async def test_a_cancelled_claim_leaves_no_trace() -> None:
    pool = pool_of(1)
    held = must(pool.try_claim("holder", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("waiter")
        assert pool.pending_claimers == 1
        claims.scopes["waiter"].cancel()
    assert pool.pending_claimers == 0
    assert pool.waiting == ()
    pool.release(held)
    assert states(pool) == [FREE]
    assert must(pool.try_claim("next", ONE)).gpu_uuids == (UUIDS[0],)


async def test_a_claim_whose_deadline_has_passed_leaves_no_trace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = pool_of(1)
    held = must(pool.try_claim("holder", ONE))
    with trio.move_on_after(60) as scope:
        await pool.claim("waiter", ONE)
    assert scope.cancelled_caught
    assert trio.current_time() >= 60
    assert pool.pending_claimers == 0
    pool.release(held)
    assert states(pool) == [FREE]


async def test_a_deadline_of_zero_gives_back_what_was_there() -> None:
    pool = pool_of(1)
    with trio.move_on_after(0) as scope:
        await pool.claim("waiter", ONE)
    assert scope.cancelled_caught
    assert states(pool) == [FREE]


async def test_a_claim_cancelled_as_it_is_granted_gives_the_gpu_to_the_next() -> None:
    pool = pool_of(1)
    held = must(pool.try_claim("holder", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("cancelled")
        await claims.add("next")
        claims.scopes["cancelled"].cancel()
        pool.release(held)
        assert holders(pool) == ["cancelled"], "it has not run yet"
    assert claims.granted == ["next"]
    assert holders(pool) == ["next"]


async def test_a_cancelled_large_claim_lets_those_behind_it_go_on() -> None:
    pool = pool_of(2)
    pool.try_claim("holder", ONE)
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO)
        await claims.add("small")
        assert pool.pending_claimers == 2
        claims.scopes["large"].cancel()
    assert holders(pool) == ["holder", "small"]


# Claims that don't wait.


async def test_try_claim_is_none_when_all_are_leased() -> None:
    pool = pool_of(1)
    assert pool.try_claim("a", ONE) is not None
    before = pool.slots.snapshot()
    assert pool.try_claim("b", ONE) is None
    assert pool.slots.snapshot() == before


async def test_try_claim_never_takes_what_a_waiter_is_due() -> None:
    pool = pool_of(2)
    held = must(pool.try_claim("holder", ONE))
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO)
        assert pool.try_claim("thief", ONE) is None, "one GPU is free, but the large claim is due both"
        assert pool.preview(ONE) is None
        pool.release(held)
        assert pool.try_claim("thief", ONE) is None, "granted, though the claimer has not run yet"
    assert claims.leases["large"].gpu_uuids == tuple(UUIDS[:2])


async def test_try_claim_of_a_higher_priority_goes_before_those_who_wait() -> None:
    pool = pool_of(2)
    pool.try_claim("holder", ONE)
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO, priority=1)
        assert pool.try_claim("equal", ONE, priority=1) is None
        assert pool.try_claim("higher", ONE, priority=2) is not None
        claims.cancel()


async def test_try_claim_does_not_touch_pending_claimers() -> None:
    pool = pool_of(1)
    assert pool.try_claim("a", ONE) is not None
    assert pool.try_claim("b", ONE) is None
    assert pool.pending_claimers == 0
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("waiter")
        pool.try_claim("c", ONE)
        assert pool.pending_claimers == 1
        claims.cancel()


async def test_claiming_gpus_by_name_refuses_and_changes_nothing() -> None:
    pool = pool_of(3)
    pool.claim_gpus("a", [UUIDS[1]])
    before = pool.slots.snapshot()
    for wanted, reason in (
        ([UUIDS[0], UUIDS[1]], Reason.ERROR_REASON_NO_FREE_GPU),
        ([UUIDS[0], UUIDS[0]], Reason.ERROR_REASON_DUPLICATE_GPU),
        (["GPU-nowhere"], Reason.ERROR_REASON_UNKNOWN_GPU),
    ):
        for take in (pool.claim_gpus, pool.reserve_gpus):
            assert refusal(lambda: take("b", wanted)).reason == reason  # noqa: B023 - called at once
    assert pool.slots.snapshot() == before


async def test_gpus_by_name_are_taken_whoever_waits_for_them() -> None:
    pool = pool_of(2)
    pool.try_claim("holder", ONE)
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO)
        assert pool.unclaimed() == [], "who is to choose is told that somebody waits for it"
        assert pool.claim_gpus("named", [UUIDS[1]]).gpu_uuids == (UUIDS[1],)
        claims.cancel()


async def test_unclaimed_gpus_are_those_that_nobody_waits_for() -> None:
    pool = GpuPool([PoolGpu(UUIDS[0], "A"), PoolGpu(UUIDS[1], "A"), PoolGpu(UUIDS[2], "B")])
    pool.claim_gpus("holder", [UUIDS[0]])
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", GpuRequest(2, name="A"))
        assert pool.unclaimed() == [UUIDS[2]]
        claims.cancel()
    assert pool.unclaimed() == UUIDS[1:3]


# What a claim may ask for.


def test_constraints_of_model_memory_uuids_and_units_hold() -> None:
    gpus = [
        PoolGpu(UUIDS[0], "A100", 40, units=24),
        PoolGpu(UUIDS[1], "H100", 80, units=40),
        PoolGpu(UUIDS[2], "H100", 80, units=40),
    ]
    for request, expected in (
        (GpuRequest(1, name="H100"), UUIDS[1:2]),
        (GpuRequest(2, memory_bytes=41), UUIDS[1:3]),
        (GpuRequest(1, gpu_uuids=(UUIDS[2],)), UUIDS[2:3]),
        (GpuRequest(1, units=25), UUIDS[1:2]),
        (GpuRequest(1, acceptable_units=frozenset({24})), UUIDS[:1]),
    ):
        assert must(GpuPool(gpus).try_claim("w", request)).gpu_uuids == tuple(expected)
    assert refusal(lambda: GpuPool(gpus).try_claim("w", GpuRequest(2, name="A100"))).message == (
        "the request needs 2 GPUs, and 1 of this worker's 3 match: ask for less"
    )
    refused = refusal(lambda: GpuPool(gpus).try_claim("w", GpuRequest(2, units=500)))
    assert refused.metadata == {"field": "gpu_units"}
    assert refused.message == (
        "the request needs 2 GPUs with 500 units, and 3 of this worker's 3 match: "
        "ask for 80 units at most, or for more GPUs"
    )


def test_a_policy_chooses_other_slots_than_the_lowest() -> None:
    gpus = [PoolGpu(uuid, memory_bytes=80, numa_node=index // 2) for index, uuid in enumerate(UUIDS)]

    def chosen(pool: GpuPool, count: int, preference: str, preferred: tuple[str, ...] = ()) -> list[int]:
        policy = workload_pb2.GpuPreference.Value(f"GPU_PREFERENCE_{preference}")
        request = GpuRequest(count, preference=policy, preferred=preferred)
        return [UUIDS.index(uuid) for uuid in must(pool.try_claim("w", request)).gpu_uuids]

    assert chosen(GpuPool(gpus), 1, "LOWEST_SLOT") == [0]
    assert chosen(GpuPool(gpus), 1, "SAME_AS_BEFORE", (UUIDS[2],)) == [2]
    pool = GpuPool(gpus)
    pool.claim_gpus("other", [UUIDS[0]])
    assert chosen(pool, 2, "SAME_NUMA_NODE") == [2, 3]
    pool = GpuPool(gpus)
    pool.slots.observe({}, {UUIDS[0]: 10, UUIDS[3]: 70})
    assert chosen(pool, 1, "MOST_FREE_MEMORY") == [3]


# Leases.


async def test_release_is_idempotent() -> None:
    pool = pool_of(3)
    lease = must(pool.try_claim("a", ONE))
    assert pool.release(lease)
    other = must(pool.try_claim("b", ONE))
    assert not pool.release(lease)
    assert pool.slots.snapshot().slots[0].lease == other


async def test_fencing_tokens_grow_and_ids_are_never_used_again() -> None:
    pool = pool_of(1)
    leases = []
    for _ in range(10):
        leases.append(must(pool.try_claim("a", ONE)))
        pool.release(leases[-1])
    tokens = [lease.fencing_token for lease in leases]
    assert tokens == sorted(set(tokens))
    assert len({lease.lease_id for lease in leases}) == 10


async def test_tokens_go_on_from_those_of_the_last_start() -> None:
    later = must(pool_of(1).try_claim("a", ONE))
    pool = pool_of(2)
    must(pool.try_claim("a", ONE))
    for years, gpu_uuid in enumerate((UUIDS[1], "GPU-that-was-taken-out"), start=1):
        token = later.fencing_token + years * 10**17
        earlier = Lease(LeaseId(f"l-{years}"), "w", (gpu_uuid,), datetime.now(UTC), token)
        pool.release(pool.adopt(earlier))
        lease = must(pool.try_claim("b", ONE))
        assert lease.fencing_token > earlier.fencing_token, "though the clock was set back"
        pool.release(lease)


def test_tokens_of_a_start_are_greater_than_those_of_all_before() -> None:
    tokens = []
    for start_number in range(1, 4):
        pool = GpuPool([PoolGpu("GPU-0")], start_number=start_number)
        for _ in range(3):
            lease = must(pool.try_claim("w", ONE))
            tokens.append(lease.fencing_token)
            pool.release(lease)
    assert tokens == sorted(set(tokens))


async def test_leases_and_reservations_are_reassigned_in_one_step() -> None:
    pool = pool_of(3)
    held = pool.claim_gpus("a", UUIDS[:2])
    reserved = pool.reserve_gpus("a", [UUIDS[2]])
    assert states(pool) == [LEASED, LEASED, RESERVED]
    lease = pool.reassign([held, reserved], [("a", [UUIDS[2], UUIDS[1]])])["a"]
    assert states(pool) == [FREE, LEASED, LEASED]
    assert lease.gpu_uuids == (UUIDS[2], UUIDS[1])
    assert lease.fencing_token > reserved.fencing_token
    assert not pool.release(held)
    assert not pool.release(reserved)
    assert pool.release(lease)


async def test_two_holders_swap() -> None:
    pool = pool_of(3)
    first, second = pool.claim_gpus("a", [UUIDS[0]]), pool.claim_gpus("b", [UUIDS[1]])
    leases = pool.reassign([first, second], [("a", [UUIDS[1]]), ("b", [UUIDS[0]])])
    assert {holder: lease.gpu_uuids for holder, lease in leases.items()} == {
        "a": (UUIDS[1],),
        "b": (UUIDS[0],),
    }
    assert states(pool) == [LEASED, LEASED, FREE]


async def test_what_a_reassignment_leaves_over_goes_to_who_waits() -> None:
    pool = pool_of(2)
    held = pool.claim_gpus("a", UUIDS[:2])
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("waiter")
        pool.reassign([held], [("a", [UUIDS[1]])])
    assert holders(pool) == ["waiter", "a"]


async def test_a_lease_that_was_released_can_not_be_reassigned() -> None:
    pool = pool_of(3)
    gone = pool.claim_gpus("a", [UUIDS[0]])
    pool.release(gone)
    other = pool.claim_gpus("b", [UUIDS[0]])
    assert pool.reassign([gone], [("a", [UUIDS[0]])]) == {}
    assert pool.slots.snapshot().slots[0].lease == other


async def test_a_lease_adopted_in_part_gives_back_that_part_only() -> None:
    pool = pool_of(2)
    pool.claim_gpus("other", [UUIDS[0]])
    earlier = Lease(LeaseId("l-1"), "w", (UUIDS[0], UUIDS[1], "GPU-gone"), datetime.now(UTC), 1)
    assert pool.adopt(earlier).gpu_uuids == (UUIDS[1],)
    assert pool.slots.get(UUIDS[1]).since == earlier.grant_time
    assert holders(pool) == ["other", "w"]
    assert pool.release(earlier)
    assert holders(pool) == ["other", None]


async def test_a_lease_adopted_in_part_exchanges_that_part_only() -> None:
    pool = pool_of(2)
    pool.claim_gpus("other", [UUIDS[0]])
    earlier = Lease(LeaseId("l-1"), "w", (UUIDS[0], UUIDS[1]), datetime.now(UTC), 1)
    pool.adopt(earlier, reserved=True)
    assert states(pool) == [LEASED, RESERVED]
    assert pool.reassign([earlier], [("w", UUIDS[:2])])["w"].gpu_uuids == (UUIDS[1],)
    assert holders(pool) == ["other", "w"]


async def test_a_workload_occupies_what_it_is_on_whatever_is_held_against_it() -> None:
    pool = pool_of(3)
    pool.slots.cordon(UUIDS[0], REPAIR)
    pool.slots.set_health(UUIDS[1], XID, "Xid 79")
    assert pool.occupy("w", UUIDS[:2]).gpu_uuids == tuple(UUIDS[:2])
    assert refusal(lambda: pool.occupy("b", UUIDS[1:3])).reason == Reason.ERROR_REASON_NO_FREE_GPU
    assert states(pool) == [LEASED, LEASED, FREE]
    pool.occupy("b", [UUIDS[2]], reserved=True)
    assert states(pool) == [LEASED, LEASED, RESERVED]


# What slots show.


async def test_snapshot_keeps_slot_order_and_names_the_holder() -> None:
    pool = pool_of(3)
    lease = pool.claim_gpus("a", [UUIDS[2], UUIDS[0]])
    snapshot = pool.slots.snapshot()
    assert [slot.gpu_uuid for slot in snapshot.slots] == UUIDS[:3]
    assert [slot.slot for slot in snapshot.slots] == [0, 1, 2]
    assert [slot.lease for slot in snapshot.slots] == [lease, None, lease]
    assert lease.gpu_uuids == (UUIDS[2], UUIDS[0]), "the holder's own order"


async def test_a_snapshot_is_of_one_moment_and_its_revision_grows() -> None:
    pool = pool_of(2)
    before = pool.slots.snapshot()
    lease = must(pool.try_claim("a", TWO))
    after = pool.slots.snapshot()
    assert before.revision < after.revision
    assert [slot.state for slot in before.slots] == [FREE, FREE], "it does not change any more"
    assert {slot.lease for slot in after.slots} == {lease}
    assert pool.slots.snapshot() == after, "nothing happened, so it is the same"
    pool.release(lease)
    assert pool.slots.snapshot().revision > after.revision


async def test_since_is_when_the_state_or_the_lease_changed() -> None:
    pool = pool_of(1)
    assert pool.slots.get(UUIDS[0]).since is None, "it may have been free for long"
    pool.slots.restore_standing(UUIDS[0], Standing(REPAIR))
    assert pool.slots.get(UUIDS[0]).since is None, "nor is it known since when it is cordoned"
    pool.slots.cordon(UUIDS[0], None)
    free = pool.slots.get(UUIDS[0]).since
    pool.try_claim("a", ONE)
    leased = pool.slots.get(UUIDS[0]).since
    assert free is not None
    assert leased is not None
    assert leased > free
    pool.slots.cordon(UUIDS[0], REPAIR)
    assert pool.slots.get(UUIDS[0]).since == leased, "it is leased as before"


async def test_wait_changed_wakes_on_every_change() -> None:
    pool = pool_of(3)
    lease: list[Lease] = []
    changes: list[Callable[[], object]] = [
        lambda: lease.append(must(pool.try_claim("a", ONE))),
        lambda: pool.release(lease[0]),
        lambda: pool.slots.cordon(UUIDS[0], REPAIR),
        lambda: pool.slots.cordon("", REPAIR),
        lambda: pool.slots.set_health(UUIDS[1], XID, "Xid 79"),
        lambda: pool.slots.reset_health(UUIDS[1]),
        lambda: pool.slots.observe({UUIDS[2]: (STRANGER,)}, {}),
    ]
    for change in changes:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pool.slots.wait_changed)
                await trio.testing.wait_all_tasks_blocked()
                change()


async def test_the_states_of_a_slot() -> None:
    pool = pool_of(4)
    assert states(pool) == [FREE] * 4
    pool.slots.observe({UUIDS[3]: (STRANGER,)}, {})
    assert states(pool) == [FREE, FREE, FREE, FOREIGN]
    pool.slots.cordon(UUIDS[3], REPAIR)
    assert states(pool)[3] == CORDONED, "an operator's word counts more than a stranger"
    pool.slots.set_health(UUIDS[3], XID, "Xid 79")
    assert states(pool)[3] == UNHEALTHY
    pool.reserve_gpus("a", [UUIDS[1]])
    pool.claim_gpus("b", [UUIDS[2]])
    assert states(pool) == [FREE, RESERVED, LEASED, UNHEALTHY]
    pool.slots.cordon(UUIDS[2], REPAIR)
    assert states(pool)[2] == LEASED, "who has it keeps it"


# What is held against a GPU, or against the worker.


async def test_bad_health_stays_until_it_is_reset() -> None:
    pool = pool_of(1)
    pool.slots.set_health(UUIDS[0], XID, "Xid 79")
    pool.slots.set_health(UUIDS[0], gpu_pb2.GPU_HEALTH_OK, "")
    assert states(pool) == [UNHEALTHY]
    assert pool.slots.get(UUIDS[0]).standing == Standing(None, XID, "Xid 79")
    pool.slots.set_health(UUIDS[0], gpu_pb2.GPU_HEALTH_LOST, "gone")
    assert pool.slots.get(UUIDS[0]).standing.health == gpu_pb2.GPU_HEALTH_LOST, "that is worse"
    pool.slots.set_health(UUIDS[0], XID, "Xid 79")
    assert pool.slots.get(UUIDS[0]).standing.health_reason == "gone"
    assert pool.try_claim("a", ONE) is None
    pool.slots.reset_health(UUIDS[0])
    assert states(pool) == [FREE]
    assert pool.slots.get(UUIDS[0]).standing == Standing()


async def test_a_throttled_gpu_gets_work_and_recovers_by_itself() -> None:
    pool = pool_of(1)
    pool.slots.set_health(UUIDS[0], gpu_pb2.GPU_HEALTH_THROTTLED, "too hot")
    assert states(pool) == [FREE]
    pool.slots.set_health(UUIDS[0], gpu_pb2.GPU_HEALTH_OK, "")
    assert pool.slots.get(UUIDS[0]).standing == Standing()


async def test_bad_health_leaves_its_holder_alone() -> None:
    pool = pool_of(1)
    lease = must(pool.try_claim("a", ONE))
    pool.slots.set_health(UUIDS[0], XID, "Xid 79")
    assert holders(pool) == ["a"]
    pool.release(lease)
    assert states(pool) == [UNHEALTHY]


@pytest.mark.parametrize(
    ("hold", "relieve"),
    [
        (lambda s: s.cordon(UUIDS[0], REPAIR), lambda s: s.cordon(UUIDS[0], None)),
        (lambda s: s.cordon("", REPAIR), lambda s: s.cordon("", None)),
        (lambda s: s.set_health(UUIDS[0], XID, "Xid 79"), lambda s: s.reset_health(UUIDS[0])),
        (lambda s: s.observe({UUIDS[0]: (STRANGER,)}, {}), lambda s: s.observe({UUIDS[0]: ()}, {})),
    ],
    ids=["cordoned", "worker cordoned", "unhealthy", "foreign"],
)
async def test_who_waits_is_granted_as_soon_as_nothing_is_held_against_the_gpu(
    hold: Callable[[GpuSlots], None], relieve: Callable[[GpuSlots], None]
) -> None:
    pool = pool_of(1)
    hold(pool.slots)
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("waiter")
        assert pool.pending_claimers == 1
        assert pool.try_claim("thief", ONE) is None
        relieve(pool.slots)
    assert holders(pool) == ["waiter"]


async def test_a_cordoned_worker_grants_nothing() -> None:
    pool = pool_of(2)
    held = must(pool.try_claim("a", ONE))
    pool.slots.cordon("", REPAIR)
    assert states(pool) == [LEASED, FREE], "who has one keeps it"
    assert pool.try_claim("b", ONE) is None
    assert pool.preview(ONE) is None
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("waiter")
        await claims.release(held)
        assert claims.granted == []
        claims.cancel()


async def test_a_cordoned_worker_gives_no_gpu_by_name_either() -> None:
    pool = pool_of(2)
    pool.slots.cordon("", REPAIR)
    for take in (pool.claim_gpus, pool.reserve_gpus):
        refused = refusal(lambda: take("b", UUIDS[:1]))  # noqa: B023 - called at once
        assert refused.reason == Reason.ERROR_REASON_CORDONED
        assert refused.message == ("the worker is cordoned by ann (repair): uncordon it first")
    assert states(pool) == [FREE, FREE]
    assert pool.claim_gpus("no GPU at all", []).gpu_uuids == ()


async def test_a_cordoned_worker_lets_who_is_on_it_swap_and_stay() -> None:
    pool = pool_of(2)
    first, second = pool.claim_gpus("a", [UUIDS[0]]), pool.claim_gpus("b", [UUIDS[1]])
    pool.slots.cordon("", REPAIR)
    leases = pool.reassign([first, second], [("a", [UUIDS[1]]), ("b", [UUIDS[0]])])
    assert holders(pool) == ["b", "a"]
    pool.release(leases["a"])
    pool.occupy("found running", [UUIDS[1]])
    assert holders(pool) == ["b", "found running"]


async def test_a_gpu_with_strangers_goes_to_who_allows_them() -> None:
    pool = pool_of(1)
    pool.slots.observe({UUIDS[0]: (STRANGER,)}, {})
    assert pool.try_claim("a", ONE) is None
    assert pool.unclaimed() == []
    assert pool.unclaimed(allow_foreign=True) == [UUIDS[0]]
    assert refusal(lambda: pool.claim_gpus("a", UUIDS[:1])).reason == Reason.ERROR_REASON_FOREIGN_PROCESS
    lease = pool.claim_gpus("b", UUIDS[:1], allow_foreign=True)
    assert states(pool) == [LEASED]
    pool.release(lease)
    assert must(pool.try_claim("b", GpuRequest(1, allow_foreign=True))).gpu_uuids == (UUIDS[0],)


async def test_what_nvml_can_not_say_stays_as_it_was_known() -> None:
    pool = pool_of(2)
    pool.slots.observe({UUIDS[0]: (STRANGER,)}, {})
    pool.slots.observe({UUIDS[1]: ()}, {})
    assert states(pool) == [FOREIGN, FREE]


async def test_what_is_held_against_gpus_is_kept_and_restored() -> None:
    kept: dict[str, Standing] = {}
    pool = GpuPool([PoolGpu(uuid) for uuid in UUIDS[:2]], kept.__setitem__)
    pool.slots.cordon(UUIDS[0], REPAIR)
    pool.slots.set_health(UUIDS[1], XID, "Xid 79")
    pool.slots.cordon("", REPAIR)
    assert kept == {
        UUIDS[0]: Standing(REPAIR),
        UUIDS[1]: Standing(None, XID, "Xid 79"),
        "": Standing(REPAIR),
    }
    again = pool_of(2)
    for gpu_uuid, standing in {**kept, "GPU-taken-out": Standing(REPAIR)}.items():
        again.slots.restore_standing(gpu_uuid, standing)
    assert states(again) == [CORDONED, UNHEALTHY]
    assert again.slots.worker_cordon == REPAIR


async def test_a_gpu_that_is_not_there_is_not_cordoned() -> None:
    pool = pool_of(1)
    for act in (lambda: pool.slots.cordon("GPU-x", REPAIR), lambda: pool.slots.reset_health("GPU-x")):
        assert refusal(act).reason == Reason.ERROR_REASON_UNKNOWN_GPU


# Why not.


async def test_why_not_names_what_keeps_the_gpus_away() -> None:
    pool = pool_of(2)
    pool.try_claim("a", ONE)
    assert pool.why_not(TWO).reason == Reason.ERROR_REASON_NO_FREE_GPU
    assert pool.slots.what_lacks(TWO) == "2 GPUs needed: 2 match, 1 free (1 leased)"
    pool.slots.observe({UUIDS[1]: (STRANGER,)}, {})
    assert pool.why_not(ONE).reason == Reason.ERROR_REASON_FOREIGN_PROCESS
    pool.slots.cordon(UUIDS[1], REPAIR)
    assert pool.why_not(ONE).reason == Reason.ERROR_REASON_CORDONED
    pool.slots.set_health(UUIDS[1], XID, "Xid 79")
    assert pool.why_not(ONE).reason == Reason.ERROR_REASON_GPU_UNHEALTHY
    pool.slots.cordon("", REPAIR)
    assert pool.why_not(ONE).reason == Reason.ERROR_REASON_CORDONED
    assert (
        pool.slots.what_lacks(ONE) == "the worker is cordoned by ann (repair): choose another, or uncordon it"
    )


async def test_why_not_counts_those_who_wait() -> None:
    pool = pool_of(2)
    pool.try_claim("a", ONE)
    async with trio.open_nursery() as nursery:
        claims = Claims(pool, nursery)
        await claims.add("large", TWO)
        assert pool.why_not(ONE).message == (
            "1 GPU needed: 2 match, 1 free, reserved for earlier claims (1 leased); "
            "1 claim waits: "
            "suspend or stop a workload, or wait"
        )
        claims.cancel()
