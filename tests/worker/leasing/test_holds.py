"""The rules of holds on a pool, one test each."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
import trio
import trio.testing
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.worker.v1.session_pb2 import CommandSpec
from leasehold_worker.errors import OperationError
from leasehold_worker.files.volume import DiskSpace
from leasehold_worker.host.capacity import HostLimits
from leasehold_worker.leasing.allocation import AllocRequest, Resources
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.holds import HOLD_LIMIT_S, HoldTerms
from leasehold_worker.leasing.host_reservations import HostRequest, HostReservations
from leasehold_worker.leasing.leases import FREE, LEASED, RESERVED, Cordon, Hold, Lease
from leasehold_worker.leasing.messages import gpu_lease_message
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.workloads.invariants import hold_violations

from tests.worker.leasing.test_pool import UUIDS, Claims, must, refusal, states

ONE, TWO = GpuRequest(1), GpuRequest(2)
TERMS = HoldTerms("c-suspend", 60.0, "ann")
REPAIR = Cordon("repair", "ann", datetime(2026, 1, 1, tzinfo=UTC))
Reason = errors_pb2.ErrorReason


@dataclass
class Host:
    """A pool with two GPUs, the workload "old" on both, and a clock that the test sets."""

    now_s: float = 1000.0
    kept: dict[str, Hold] = field(default_factory=dict)
    gpus: int = 2

    def __post_init__(self) -> None:
        self.pool = self.start()
        self.old = must(self.pool.try_claim("old", GpuRequest(2)))

    def start(self) -> GpuPool:
        return GpuPool(
            [PoolGpu(uuid) for uuid in UUIDS[: self.gpus]], keep_hold=self.keep, clock=lambda: self.now_s
        )

    def keep(self, hold_id: str, hold: Hold | None) -> None:
        if hold is None:
            self.kept.pop(hold_id, None)
        else:
            self.kept[hold_id] = hold

    def suspend(self, lease: Lease | None = None, terms: HoldTerms | None = TERMS) -> None:
        lease = lease or self.old
        with self.pool.holds.begun_by(lease.workload_id, terms):
            self.pool.release(lease)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.pool.holds.expire()


@pytest.fixture
def host() -> Host:
    return Host()


def test_gpus_that_a_suspend_frees_are_reserved_for_the_hold(host: Host) -> None:
    host.suspend()
    pool = host.pool
    assert states(pool) == [RESERVED, RESERVED]
    (hold,) = pool.holds
    assert (hold.hold_id, hold.workload_ids, hold.held_by) == ("c-suspend", ("old",), "ann")
    assert set(hold.gpu_uuids) == set(UUIDS[:2])
    assert hold.expire_time - hold.create_time == timedelta(seconds=60)
    assert host.kept == {"c-suspend": hold}
    message = gpu_lease_message(pool.slots.get(UUIDS[0]), None)
    assert not message.HasField("workload_id")
    assert not message.HasField("lease_id")
    assert (message.state, message.hold.hold_id, message.hold.held_by) == (
        lease_pb2.SLOT_STATE_RESERVED,
        "c-suspend",
        "ann",
    )
    assert not list(hold_violations(pool))


def test_nobody_else_gets_them(host: Host) -> None:
    host.suspend()
    pool = host.pool
    assert pool.try_claim("other", ONE) is None
    assert pool.unclaimed(allow_foreign=True) == []
    assert pool.unclaimed(for_helper=True) == []
    for act in (pool.claim_gpus, pool.reserve_gpus, pool.occupy):
        assert refusal(lambda act=act: act("other", UUIDS[:1])).reason == Reason.ERROR_REASON_NO_FREE_GPU  # type: ignore[misc]
    assert "under hold c-suspend" in refusal(lambda: pool.claim_gpus("other", UUIDS[:1])).message
    assert states(pool) == [RESERVED, RESERVED]


async def test_who_waits_does_not_overtake_and_is_served_at_the_expiry(host: Host) -> None:
    async with trio.open_nursery() as nursery:
        claims = Claims(host.pool, nursery)
        await claims.add("waiter")
        host.suspend()
        await trio.testing.wait_all_tasks_blocked()
        assert claims.granted == []
        host.pass_s(59.9)
        await trio.testing.wait_all_tasks_blocked()
        assert claims.granted == []
        host.pass_s(0.2)
        await trio.testing.wait_all_tasks_blocked()
        assert claims.granted == ["waiter"]
        assert not host.kept
        claims.cancel()


async def test_who_waits_gets_what_the_taker_did_not_need(host: Host) -> None:
    async with trio.open_nursery() as nursery:
        claims = Claims(host.pool, nursery)
        await claims.add("waiter")
        host.suspend()
        with host.pool.holds.taken_by("new", "c-suspend"):
            taken = must(host.pool.try_claim("new", ONE, hold_id="c-suspend"))
            await trio.testing.wait_all_tasks_blocked()
            assert claims.granted == [], "the taker may still fail"
        await trio.testing.wait_all_tasks_blocked()
        assert claims.granted == ["waiter"]
        assert set(claims.leases["waiter"].gpu_uuids) == set(UUIDS[:2]) - set(taken.gpu_uuids)
        assert list(host.pool.holds) == []
        assert not host.kept
        claims.cancel()


def test_a_taker_that_fails_gives_them_back_to_the_hold(host: Host) -> None:
    host.suspend()

    def fail() -> None:
        with host.pool.holds.taken_by("new", "c-suspend"):
            lease = must(host.pool.try_claim("new", TWO, hold_id="c-suspend"))
            assert states(host.pool) == [LEASED, LEASED]
            host.pool.release(lease)
            raise OperationError(Reason.ERROR_REASON_SPAWN_FAILED, "no such program")

    refusal(fail)
    assert states(host.pool) == [RESERVED, RESERVED]
    assert not list(hold_violations(host.pool))
    host.pass_s(61)
    assert states(host.pool) == [FREE, FREE]


def test_a_reservation_that_is_not_used_returns_to_the_hold_too(host: Host) -> None:
    host.suspend()

    def fail() -> None:
        with host.pool.holds.taken_by("old", "c-suspend"):
            reserved = host.pool.reserve_gpus("old", UUIDS[:2], hold_id="c-suspend")
            host.pool.reassign([reserved], [("old", UUIDS[1:2])])
            raise OperationError(Reason.ERROR_REASON_DRIVER_ERROR, "one member is stuck")

    refusal(fail)
    assert states(host.pool) == [RESERVED, LEASED], "the driver left something on one of them"
    assert not list(hold_violations(host.pool))


def test_a_taker_that_keeps_everything_though_it_failed_ends_the_hold(host: Host) -> None:
    host.suspend()

    def fail() -> None:
        with host.pool.holds.taken_by("new", "c-suspend"):
            host.pool.claim_gpus("new", UUIDS[:2], hold_id="c-suspend")
            raise OperationError(Reason.ERROR_REASON_DRIVER_ERROR, "all members are stuck")

    refusal(fail)
    assert states(host.pool) == [LEASED, LEASED]
    assert not host.kept


def test_a_hold_does_not_expire_while_it_is_taken(host: Host) -> None:
    host.suspend()
    with host.pool.holds.taken_by("new", "c-suspend"):
        host.pass_s(1000)
        assert states(host.pool) == [RESERVED, RESERVED]
        must(host.pool.try_claim("new", TWO, hold_id="c-suspend"))
    assert states(host.pool) == [LEASED, LEASED]


def test_only_one_takes_a_hold_and_nobody_gives_up_what_is_taken(host: Host) -> None:
    host.suspend()
    holds = host.pool.holds
    with holds.taken_by("new", "c-suspend"):
        for act in (lambda: holds.begin_taking("other", "c-suspend"), lambda: holds.release("c-suspend")):
            assert refusal(act).reason == Reason.ERROR_REASON_WORKLOAD_BUSY


def test_a_hold_can_be_given_up(host: Host) -> None:
    host.suspend()
    host.pool.holds.release("c-suspend")
    assert states(host.pool) == [FREE, FREE]
    assert not host.kept
    assert refusal(lambda: host.pool.holds.release("c-suspend")).reason == Reason.ERROR_REASON_UNKNOWN_HOLD


def test_a_hold_that_is_gone_is_refused(host: Host) -> None:
    host.suspend()
    host.pass_s(60)
    pool = host.pool
    for act in (
        lambda: pool.holds.begin_taking("new", "c-suspend"),
        lambda: pool.try_claim("new", ONE, hold_id="c-suspend"),
        lambda: pool.claim_gpus("new", UUIDS[:1], hold_id="c-suspend"),
        lambda: pool.holds.usable("c-suspend", allow_foreign=False),
    ):
        assert refusal(act).reason == Reason.ERROR_REASON_UNKNOWN_HOLD


def test_a_suspend_that_fails_leaves_no_hold(host: Host) -> None:
    def fail() -> None:
        with host.pool.holds.begun_by("old", TERMS):
            host.pool.release(host.old)  # the workload has crashed
            raise OperationError(Reason.ERROR_REASON_TARGET_CRASHED, "it has ended")

    refusal(fail)
    assert states(host.pool) == [FREE, FREE]
    assert not host.kept


def test_a_suspend_without_a_hold_frees_as_before(host: Host) -> None:
    host.suspend(terms=None)
    assert states(host.pool) == [FREE, FREE]


def test_a_taker_may_have_free_gpus_beside_those_of_the_hold(host: Host) -> None:
    host = Host(gpus=4)
    host.suspend()
    assert must(host.pool.try_claim("small", ONE, hold_id="c-suspend")).gpu_uuids == (UUIDS[0],)
    assert set(must(host.pool.try_claim("large", GpuRequest(3), hold_id="c-suspend")).gpu_uuids) == {
        UUIDS[1],
        UUIDS[2],
        UUIDS[3],
    }


def test_a_hold_goes_before_free_gpus_in_lower_slots() -> None:
    host = Host(gpus=4)
    other = must(host.pool.try_claim("other", ONE))
    host.pool.release(host.old)
    host.suspend(other)
    assert other.gpu_uuids == (UUIDS[2],)
    assert must(host.pool.try_claim("new", ONE, hold_id="c-suspend")).gpu_uuids == (UUIDS[2],)


async def test_what_is_kept_for_who_waits_keeps_no_gpu_of_the_hold_from_its_taker() -> None:
    pool = GpuPool([PoolGpu(UUIDS[0], "A"), PoolGpu(UUIDS[1], "A"), PoolGpu(UUIDS[2], "B")])
    lease = pool.claim_gpus("old", UUIDS[:2])
    async with trio.open_nursery() as nursery:
        await Claims(pool, nursery).add("waiter", GpuRequest(2, name="A"))
        with pool.holds.begun_by("old", TERMS):
            pool.release(lease)
        assert must(pool.try_claim("new", GpuRequest(3), hold_id="c-suspend")).gpu_uuids == tuple(UUIDS[:3])
        nursery.cancel_scope.cancel()


async def test_free_gpus_that_wait_for_a_claim_are_not_taken_along(host: Host) -> None:
    host = Host(gpus=3)
    async with trio.open_nursery() as nursery:
        claims = Claims(host.pool, nursery)
        await claims.add("waiter", GpuRequest(3))
        host.suspend()
        assert host.pool.try_claim("new", GpuRequest(3), hold_id="c-suspend") is None
        assert must(host.pool.try_claim("new", TWO, hold_id="c-suspend")).gpu_uuids == tuple(UUIDS[:2])
        claims.cancel()


def test_a_held_gpu_that_is_cordoned_is_not_taken(host: Host) -> None:
    host.suspend()
    host.pool.slots.cordon(UUIDS[0], REPAIR)
    pool = host.pool
    assert pool.preview(ONE, hold_id="c-suspend") == (UUIDS[1],)
    assert pool.holds.usable("c-suspend", allow_foreign=False) == [UUIDS[1]]
    refused = refusal(lambda: pool.claim_gpus("new", UUIDS[:1], hold_id="c-suspend"))
    assert refused.reason == Reason.ERROR_REASON_CORDONED
    host.pool.slots.cordon("", REPAIR)
    assert pool.preview(ONE, hold_id="c-suspend") is None


def test_two_holds_are_apart(host: Host) -> None:
    host = Host(gpus=4)
    other = must(host.pool.try_claim("other", TWO))
    host.suspend()
    host.suspend(other, HoldTerms("c-other", 30))
    assert must(host.pool.try_claim("new", TWO, hold_id="c-other")).gpu_uuids == tuple(UUIDS[2:])
    host.pass_s(40)
    assert [hold.hold_id for hold in host.pool.holds] == ["c-suspend"]
    assert states(host.pool) == [RESERVED, RESERVED, LEASED, LEASED]


def test_a_hold_comes_back_with_its_remaining_time(host: Host) -> None:
    host.suspend()
    (hold,) = host.kept.values()
    now = datetime.now(UTC)
    host.pool = host.start()
    aged = replace(hold, create_time=now - timedelta(seconds=50), expire_time=now + timedelta(seconds=10))
    host.pool.holds.adopt(aged)
    assert states(host.pool) == [RESERVED, RESERVED]
    since = {slot.since for slot in host.pool.slots.snapshot().slots}
    assert since == {aged.create_time}, "the GPUs were held before the worker's start"
    assert not list(hold_violations(host.pool))
    host.pass_s(9)
    assert states(host.pool) == [RESERVED, RESERVED]
    host.pass_s(2)
    assert states(host.pool) == [FREE, FREE]


def test_a_wall_clock_that_was_set_back_makes_no_hold_longer(host: Host) -> None:
    host.suspend()
    (hold,) = host.kept.values()
    host.pool = host.start()
    later = timedelta(days=3)
    host.pool.holds.adopt(
        replace(hold, create_time=hold.create_time + later, expire_time=hold.expire_time + later)
    )
    host.pass_s(61)
    assert states(host.pool) == [FREE, FREE]


def test_a_hold_comes_back_without_gpus_that_a_workload_leases(host: Host) -> None:
    host.suspend()
    (hold,) = host.kept.values()
    host.pool = host.start()
    host.pool.occupy("new", UUIDS[:1])
    host.pool.holds.adopt(hold)
    assert states(host.pool) == [LEASED, RESERVED]
    host.pool = host.start()
    host.pool.occupy("new", UUIDS[:2])
    host.pool.holds.adopt(hold)
    host.pool.holds.expire()
    assert not host.kept


async def test_holds_end_by_themselves(autojump_clock: trio.testing.MockClock) -> None:
    pool = GpuPool([PoolGpu(UUIDS[0])], clock=trio.current_time)
    lease = must(pool.try_claim("old", ONE))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.holds.run)
        await trio.testing.wait_all_tasks_blocked()
        with pool.holds.begun_by("old", TERMS):
            pool.release(lease)
        assert (await pool.claim("waiter", ONE)) is not None
        assert trio.current_time() >= 60
        nursery.cancel_scope.cancel()


async def test_a_taker_goes_before_those_who_wait_for_cpu_time(host: Host) -> None:
    limits, space = HostLimits(1000, 2**30), DiskSpace(2**30, 2**30)
    resources = Resources(host.pool, HostReservations(limits, lambda: space, lambda: 0, host.pool.note_host))
    cpu = HostRequest(cpu_millicores=1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(resources.claim, "waiter", AllocRequest(TWO, cpu))
        await trio.testing.wait_all_tasks_blocked()
        host.suspend()
        request = AllocRequest(ONE, cpu, "c-suspend")
        assert len(resources.alloc("new", request, live=False).gpu_uuids) == 1
        with host.pool.holds.taken_by("new", "c-suspend"):
            allocation = resources.alloc("new", request, live=True)
        assert must(allocation.lease).workload_id == "new"
        nursery.cancel_scope.cancel()


def suspend_command(**fields: object) -> CommandSpec:
    suspend = SuspendOperation(**fields)  # type: ignore[arg-type]  # fields by name
    return CommandSpec(command_id="c-9", operation=Operation(suspend=suspend))


def test_the_terms_are_those_of_the_command() -> None:
    assert HoldTerms.of(suspend_command()) is None
    terms = HoldTerms.of(suspend_command(hold_for=Duration(seconds=90), held_by="x" * 300))
    assert terms == HoldTerms("c-9", 90.0, "x" * 256)
    for seconds in (0, -1, int(HOLD_LIMIT_S) + 1):
        refused = refusal(lambda s=seconds: HoldTerms.of(suspend_command(hold_for=Duration(seconds=s))))  # type: ignore[misc]
        assert refused.reason == Reason.ERROR_REASON_INVALID_ARGUMENT


ACTS: list[Callable[[Host], object]] = [
    lambda host: host.pool.holds.settle("nobody", done=True),
    lambda host: host.pool.holds.settle("nobody", done=False),
]


@pytest.mark.parametrize("act", ACTS)
def test_an_operation_without_a_hold_changes_none(host: Host, act: Callable[[Host], object]) -> None:
    host.suspend()
    act(host)
    assert states(host.pool) == [RESERVED, RESERVED]
