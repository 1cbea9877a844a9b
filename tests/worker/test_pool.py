"""The pool's behaviour, one test each: origins and beyond."""

import pytest
import trio
import trio.testing
from leasehold.v1 import errors_pb2, lease_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.gpu_choice import GpuRequest, PoolGpu
from leasehold_worker.leases import Lease, LeaseSnapshot
from leasehold_worker.pool import GpuPool

UUIDS = [f"GPU-{index:08d}-0000-0000-0000-000000000000" for index in range(3)]
ONE, TWO = GpuRequest(1), GpuRequest(2)


def pool_of(uuids: list[str]) -> GpuPool:
    return GpuPool([PoolGpu(uuid) for uuid in uuids])


def states(pool: GpuPool) -> list[int]:
    return [slot.state for slot in pool.snapshot_leases().slots]


FREE, RESERVED, LEASED = (
    lease_pb2.SLOT_STATE_FREE,
    lease_pb2.SLOT_STATE_RESERVED,
    lease_pb2.SLOT_STATE_LEASED,
)


async def test_claim_on_a_cpu_host_is_none_at_once() -> None:
    pool = pool_of([])
    with trio.fail_after(1):
        assert await pool.claim("w", ONE) is None
    assert pool.try_claim("w", ONE) is None
    assert pool.capacity == 0
    assert pool.snapshot_leases() == LeaseSnapshot(0, ())


async def test_the_lowest_free_slot_wins() -> None:
    pool = pool_of(UUIDS)
    first, second = await pool.claim("a", ONE), await pool.claim("b", ONE)
    assert first is not None
    assert second is not None
    assert (first.gpu_uuids, second.gpu_uuids) == ((UUIDS[0],), (UUIDS[1],))
    pool.release(first)
    third = await pool.claim("c", ONE)
    assert third is not None
    assert third.gpu_uuids == (UUIDS[0],)


async def test_claims_wait_in_order() -> None:
    pool = pool_of(UUIDS[:1])
    held = pool.try_claim("holder", ONE)
    assert held is not None
    granted: list[str] = []

    async def claim(name: str) -> None:
        lease = await pool.claim(name, ONE)
        assert lease is not None
        granted.append(name)
        pool.release(lease)

    async with trio.open_nursery() as nursery:
        for count, name in enumerate(["first", "second", "third"], start=1):
            nursery.start_soon(claim, name)
            await trio.testing.wait_all_tasks_blocked()
            assert pool.pending_claimers == count
        pool.release(held)
    assert granted == ["first", "second", "third"]
    assert pool.pending_claimers == 0


async def test_try_claim_never_takes_what_a_waiter_is_due() -> None:
    pool = pool_of(UUIDS[:2])
    held = pool.try_claim("holder", ONE)
    assert held is not None
    got: list[Lease | None] = []

    async def claim_two() -> None:
        got.append(await pool.claim("large", TWO))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(claim_two)
        await trio.testing.wait_all_tasks_blocked()
        assert pool.try_claim("thief", ONE) is None, "one GPU is free, but the large claim is due both"
        pool.release(held)
        assert pool.try_claim("thief", ONE) is None
    assert got[0] is not None
    assert got[0].gpu_uuids == tuple(UUIDS[:2])


async def test_try_claim_does_not_count_as_pending() -> None:
    pool = pool_of(UUIDS[:1])
    assert pool.try_claim("a", ONE) is not None
    assert pool.try_claim("b", ONE) is None
    assert pool.pending_claimers == 0


async def test_a_cancelled_claim_leaves_no_trace() -> None:
    pool = pool_of(UUIDS[:1])
    held = pool.try_claim("holder", ONE)
    assert held is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.claim, "waiter", ONE)
        await trio.testing.wait_all_tasks_blocked()
        assert pool.pending_claimers == 1
        nursery.cancel_scope.cancel()
    assert pool.pending_claimers == 0
    pool.release(held)
    assert pool.try_claim("next", ONE) is not None


async def test_a_claim_cancelled_as_it_is_granted_gives_the_gpu_back() -> None:
    pool = pool_of(UUIDS[:1])
    held = pool.try_claim("holder", ONE)
    assert held is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.claim, "waiter", ONE)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        pool.release(held)
    assert states(pool) == [FREE]


async def test_a_cancelled_large_claim_lets_those_behind_it_go_on() -> None:
    pool = pool_of(UUIDS[:2])
    assert pool.try_claim("holder", ONE) is not None
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def claim_two() -> None:
            with scope:
                await pool.claim("large", TWO)

        nursery.start_soon(claim_two)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(pool.claim, "small", ONE)
        await trio.testing.wait_all_tasks_blocked()
        assert pool.pending_claimers == 2
        scope.cancel()
    assert states(pool) == [LEASED, LEASED]


async def test_release_is_idempotent() -> None:
    pool = pool_of(UUIDS)
    lease = pool.try_claim("a", ONE)
    assert lease is not None
    assert pool.release(lease)
    other = pool.try_claim("b", ONE)
    assert other is not None
    assert not pool.release(lease)
    assert pool.snapshot_leases().slots[0].lease == other


async def test_snapshot_keeps_slot_order_and_names_the_holder() -> None:
    pool = pool_of(UUIDS)
    lease = pool.claim_gpus("a", [UUIDS[2], UUIDS[0]])
    snapshot = pool.snapshot_leases()
    assert [slot.gpu_uuid for slot in snapshot.slots] == UUIDS
    assert [slot.slot for slot in snapshot.slots] == [0, 1, 2]
    assert [slot.lease for slot in snapshot.slots] == [lease, None, lease]
    assert lease.gpu_uuids == (UUIDS[2], UUIDS[0]), "the holder's own order"


async def test_fencing_tokens_grow() -> None:
    pool = pool_of(UUIDS)
    tokens = [lease.fencing_token for lease in (pool.try_claim("a", ONE), pool.try_claim("b", ONE)) if lease]
    assert tokens[0] < tokens[1]


@pytest.mark.parametrize("count", [0, -1, 4])
async def test_a_count_that_can_never_be_granted_is_refused(count: int) -> None:
    pool = pool_of(UUIDS)
    with pytest.raises(OperationError) as error:
        await pool.claim("a", GpuRequest(count))
    assert error.value.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    assert pool.pending_claimers == 0


async def test_claiming_gpus_by_name_refuses_and_changes_nothing() -> None:
    pool = pool_of(UUIDS)
    pool.claim_gpus("a", [UUIDS[1]])
    before = pool.snapshot_leases()
    for wanted, reason in (
        ([UUIDS[0], UUIDS[1]], errors_pb2.ERROR_REASON_NO_FREE_GPU),
        ([UUIDS[0], UUIDS[0]], errors_pb2.ERROR_REASON_DUPLICATE_GPU),
        (["GPU-nowhere"], errors_pb2.ERROR_REASON_UNKNOWN_GPU),
    ):
        with pytest.raises(OperationError) as error:
            pool.claim_gpus("b", wanted)
        assert error.value.reason == reason
    assert pool.snapshot_leases() == before


async def test_leases_and_reservations_are_reassigned_in_one_step() -> None:
    pool = pool_of(UUIDS)
    held = pool.claim_gpus("a", UUIDS[:2])
    reserved = pool.reserve_gpus("a", [UUIDS[2]])
    assert states(pool) == [LEASED, LEASED, RESERVED]
    lease = pool.reassign([held, reserved], [("a", [UUIDS[2], UUIDS[1]])])["a"]
    assert states(pool) == [FREE, LEASED, LEASED]
    assert lease.gpu_uuids == (UUIDS[2], UUIDS[1])
    assert not pool.release(held)
    assert not pool.release(reserved)
    assert pool.release(lease)


async def test_two_holders_swap() -> None:
    pool = pool_of(UUIDS)
    first, second = pool.claim_gpus("a", [UUIDS[0]]), pool.claim_gpus("b", [UUIDS[1]])
    leases = pool.reassign([first, second], [("a", [UUIDS[1]]), ("b", [UUIDS[0]])])
    assert {holder: lease.gpu_uuids for holder, lease in leases.items()} == {
        "a": (UUIDS[1],),
        "b": (UUIDS[0],),
    }
    assert states(pool) == [LEASED, LEASED, FREE]


async def test_a_lease_that_was_released_can_not_be_reassigned() -> None:
    pool = pool_of(UUIDS)
    gone = pool.claim_gpus("a", [UUIDS[0]])
    pool.release(gone)
    other = pool.claim_gpus("b", [UUIDS[0]])
    assert pool.reassign([gone], [("a", [UUIDS[0]])]) == {}
    assert pool.snapshot_leases().slots[0].lease == other


async def test_wait_changed_wakes_on_every_change() -> None:
    pool = pool_of(UUIDS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.wait_changed)
        await trio.testing.wait_all_tasks_blocked()
        pool.try_claim("a", ONE)
