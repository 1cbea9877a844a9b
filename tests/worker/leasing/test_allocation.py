"""Allocation of all kinds of resources together."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import pytest
import trio
import trio.testing
from leasehold.v1 import errors_pb2, gpu_pb2, worker_pb2, workload_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.files.volume import DiskSpace
from leasehold_worker.host.capacity import HostLimits
from leasehold_worker.leasing.allocation import Allocation, AllocRequest, Preview, Resources
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.host_reservations import HostRequest, HostReservation, HostReservations
from leasehold_worker.leasing.leases import Cordon, ForeignProcess
from leasehold_worker.leasing.pool import GpuPool

GIB = 2**30
CORDON = Cordon("repair", "ada", datetime.now(UTC))


class Host:
    """GPUs of 4, 4 and 8 units, 16 cores, 64 GiB, and a disk of 100 GiB."""

    def __init__(self, units: tuple[int, ...] = (4, 4, 8)) -> None:
        self.pool = GpuPool(
            [PoolGpu(f"GPU-{slot}", "P40", (slot + 1) * 10 * GIB, of) for slot, of in enumerate(units)]
        )
        self.disk = DiskSpace(100 * GIB, 100 * GIB)
        self.ledger = HostReservations(
            HostLimits(16_000, 64 * GIB), lambda: self.disk, lambda: 0, self.pool.note_host
        )
        self.resources = Resources(self.pool, self.ledger)

    def take(self, request: AllocRequest, name: str = "w") -> Allocation:
        return self.resources.alloc(name, request, live=True)

    def preview(self, request: AllocRequest) -> Preview:
        return self.resources.alloc("w", request, live=False)

    def fetch(self) -> worker_pb2.MachineResources:
        return self.resources.fetch_machine_resources()

    def refused(self, request: AllocRequest, live: bool = True) -> OperationError:
        before = self.fetch()
        with pytest.raises(OperationError) as refused:
            self.take(request) if live else self.preview(request)
        assert self.fetch() == before
        return refused.value


@pytest.fixture
def host() -> Host:
    return Host()


def gpus(count: int, units: int = 0, *acceptable: int, memory_bytes: int = 0) -> AllocRequest:
    return AllocRequest(GpuRequest(count, memory_bytes, units=units, acceptable_units=frozenset(acceptable)))


def uuids(allocation: Allocation) -> tuple[str, ...]:
    return allocation.lease.gpu_uuids if allocation.lease else ()


def test_all_kinds_are_taken_and_given_back_together(host: Host) -> None:
    idle = host.fetch()
    allocation = host.take(AllocRequest(GpuRequest(2), HostRequest(4000, 8 * GIB, 30 * GIB)))
    assert uuids(allocation) == ("GPU-0", "GPU-1")
    assert allocation.host.request == HostRequest(4000, 8 * GIB, 30 * GIB)
    busy = host.fetch()
    assert (busy.gpu_count_free, busy.gpu_units_free, busy.cpu_millicores_free) == (1, 8, 12_000)
    assert (busy.memory_free_bytes, busy.disk_free_bytes) == (56 * GIB, 60 * GIB)
    allocation.release()
    assert host.fetch() == idle


@pytest.mark.parametrize(
    ("host_request", "field"),
    [
        (HostRequest(17_000, GIB, GIB), "cpu_millicores"),
        (HostRequest(1000, 65 * GIB, GIB), "memory_bytes"),
        (HostRequest(1000, GIB, 91 * GIB), "disk_bytes"),
    ],
)
def test_where_one_kind_lacks_nothing_is_taken(host: Host, host_request: HostRequest, field: str) -> None:
    for live in (True, False):
        error = host.refused(AllocRequest(GpuRequest(1), host_request), live)
        assert error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
        assert error.metadata["field"] == field


def test_gpus_are_asked_for_first(host: Host) -> None:
    error = host.refused(AllocRequest(GpuRequest(4), HostRequest(cpu_millicores=17_000)))
    assert error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU


def test_a_preview_says_what_would_be_taken_and_takes_nothing(host: Host) -> None:
    idle = host.fetch()
    request = AllocRequest(GpuRequest(1, units=5), HostRequest(1000, GIB, GIB))
    for _ in range(4):
        assert host.preview(request) == Preview(("GPU-2",), HostRequest(1000, GIB, GIB))
    assert host.fetch() == idle
    assert uuids(host.take(request)) == ("GPU-2",)
    assert host.refused(request, live=False).reason == host.refused(request).reason


def test_a_preview_of_too_much_is_refused(host: Host) -> None:
    assert host.refused(gpus(1, memory_bytes=31 * GIB), live=False).reason == (
        errors_pb2.ERROR_REASON_NO_FREE_GPU
    )


# As in the origin's tests of its allocator.


def test_a_card_that_is_taken_is_not_taken_again() -> None:
    host = Host(units=(4,))
    host.take(gpus(1))
    assert host.refused(gpus(1)).reason == errors_pb2.ERROR_REASON_NO_FREE_GPU


def test_two_cards_have_their_units_together(host: Host) -> None:
    assert uuids(host.take(gpus(2, 8, 4))) == ("GPU-0", "GPU-1")


def test_of_those_that_suffice_the_smallest_is_taken() -> None:
    host = Host(units=(16, 8, 2, 4, 8))
    assert uuids(host.take(gpus(1, 3))) == ("GPU-3",)
    assert uuids(host.take(gpus(1, 3))) == ("GPU-1",)
    assert uuids(host.take(gpus(1, 3))) == ("GPU-4",)
    assert uuids(host.take(gpus(1, 3))) == ("GPU-0",)


def test_only_acceptable_units_are_taken(host: Host) -> None:
    assert uuids(host.take(gpus(1, 0, 8))) == ("GPU-2",)
    assert host.refused(gpus(1, 0, 8)).reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    assert host.refused(gpus(1, 0, 16)).reason == errors_pb2.ERROR_REASON_NO_FREE_GPU


def test_who_wants_no_gpu_gets_none() -> None:
    host = Host(units=())
    allocation = host.take(AllocRequest(host=HostRequest(1000)))
    assert allocation.lease is None
    assert host.preview(AllocRequest(host=HostRequest(1000))).gpu_uuids == ()
    assert host.refused(gpus(1)).reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    allocation.release()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (gpus(0, 4), "gpu_count"),
        (gpus(0, 0, 4), "gpu_count"),
        (gpus(0, memory_bytes=GIB), "gpu_count"),
        (AllocRequest(GpuRequest(0, name="H100")), "gpu_count"),
        (AllocRequest(GpuRequest(0, gpu_uuids=("GPU-0",))), "gpu_count"),
        (gpus(-1), "gpu_count"),
        (gpus(1, -1), "gpu_units"),
        (gpus(1, memory_bytes=-1), "gpu_memory_bytes"),
        (gpus(1, 0, 0, 4), "acceptable_gpu_units"),
        (gpus(2, 9, 2, 4), "gpu_units"),
        (AllocRequest(GpuRequest(2, gpu_uuids=("GPU-0", "GPU-0"))), "gpu_uuids"),
    ],
)
def test_what_makes_no_sense_is_refused(host: Host, request_: AllocRequest, field: str) -> None:
    for live in (True, False):
        error = host.refused(request_, live)
        assert error.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
        assert error.metadata == {"field": field}


def test_the_request_of_a_spec() -> None:
    resources = workload_pb2.Resources(
        gpu_count=2,
        gpu_memory_bytes=GIB,
        gpu_name="P40",
        cpu_millicores=500,
        memory_bytes=2 * GIB,
        disk_bytes=3 * GIB,
        gpu_units=8,
        acceptable_gpu_units=[4, 8],
        gpu_uuids=["GPU-1", "GPU-2"],
        gpu_preference=workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE,
        allow_foreign=True,
    )
    request = AllocRequest.of(resources, preferred=["GPU-2"])
    request.validate()
    assert request == AllocRequest(
        GpuRequest(
            2,
            GIB,
            "P40",
            ("GPU-1", "GPU-2"),
            8,
            frozenset({4, 8}),
            workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE,
            ("GPU-2",),
            True,
        ),
        HostRequest(500, 2 * GIB, 3 * GIB),
    )
    assert AllocRequest.of(workload_pb2.Resources()) == AllocRequest()


# Giving back.


def test_a_second_release_is_an_error(host: Host) -> None:
    allocation = host.take(AllocRequest(GpuRequest(1), HostRequest(1000)))
    allocation.release()
    other = host.take(gpus(3), "other")
    with pytest.raises(OperationError, match="the shares of workload w were already released") as refused:
        allocation.release()
    assert refused.value.reason == errors_pb2.ERROR_REASON_ALREADY_RELEASED
    assert host.fetch().gpu_count_free == 0
    other.release()


def test_every_kind_that_was_given_back_before_is_an_error_and_the_rest_is_given_back(host: Host) -> None:
    idle = host.fetch()
    allocation = host.take(AllocRequest(GpuRequest(1), HostRequest(1000)))
    host.ledger.release(allocation.host)
    with pytest.raises(ExceptionGroup) as failed:
        allocation.release()
    assert [error.reason for error in failed.value.exceptions if isinstance(error, OperationError)] == [
        errors_pb2.ERROR_REASON_ALREADY_RELEASED
    ]
    assert host.fetch() == idle
    allocation = host.take(AllocRequest(GpuRequest(1), HostRequest(1000)))
    assert allocation.lease is not None
    host.pool.release(allocation.lease)
    host.ledger.release(allocation.host)
    with pytest.raises(ExceptionGroup) as failed:
        allocation.release()
    assert len(failed.value.exceptions) == 2
    assert host.fetch() == idle


def test_a_lease_that_was_handed_over_is_left_alone(host: Host) -> None:
    allocation = host.take(AllocRequest(GpuRequest(1), HostRequest(1000)))
    lease = allocation.hand_over_lease()
    assert lease is not None
    assert (allocation.lease, allocation.hand_over_lease()) == (None, None)
    allocation.release()
    assert (host.fetch().gpu_count_free, host.fetch().cpu_millicores_free) == (2, 16_000)
    assert host.pool.release(lease)


def test_what_goes_wrong_with_a_rollback_is_kept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []

    def fail(_: object, lease: object) -> bool:
        released.append("tried")
        raise RuntimeError("the pool is broken")

    monkeypatch.setattr(GpuPool, "release", fail)
    with pytest.raises(OperationError, match="17 cores") as refused:
        host.take(AllocRequest(GpuRequest(1), HostRequest(cpu_millicores=17_000)))
    assert released == ["tried"]
    assert any("the pool is broken" in note for note in refused.value.__notes__)


def test_what_was_held_before_a_restart_is_taken_back(host: Host) -> None:
    held = host.ledger.take_back("w", HostRequest(20_000, GIB, GIB))
    assert host.fetch().cpu_millicores_free == 0
    host.ledger.release(held)
    assert host.fetch().cpu_millicores_free == 16_000


# Waiting.


async def test_a_claim_waits_for_gpus_and_the_rest_together(host: Host) -> None:
    request = AllocRequest(GpuRequest(1), HostRequest(cpu_millicores=10_000))
    first = await host.resources.claim("first", request)
    granted: list[Allocation] = []

    async def claim() -> None:
        granted.append(await host.resources.claim("second", request))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(claim)
        await trio.testing.wait_all_tasks_blocked()
        assert granted == [], "GPUs are free, but too few cores"
        assert host.pool.pending_claimers == 1
        first.release()
    assert granted[0].host.request.cpu_millicores == 10_000
    assert host.fetch().gpu_count_free == 2


async def test_a_claim_that_is_cancelled_leaves_no_trace(host: Host) -> None:
    idle = host.fetch()
    full = AllocRequest(GpuRequest(3), HostRequest(cpu_millicores=16_000))
    with trio.move_on_after(0):
        await host.resources.claim("w", full)  # granted at once, and cancelled before it returns
    assert host.fetch() == idle
    held = host.take(full)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: host.resources.claim("w", full))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    held.release()
    assert host.fetch() == idle
    assert host.pool.pending_claimers == 0


async def test_what_no_waiting_helps_is_refused_at_once(host: Host) -> None:
    with pytest.raises(OperationError, match="has at most 16 cores"):
        await host.resources.claim("w", AllocRequest(GpuRequest(1), HostRequest(17_000)))
    with pytest.raises(OperationError) as refused:
        await Host(units=()).resources.claim("w", gpus(1))
    assert refused.value.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    allocation = await host.resources.claim("w", AllocRequest(host=HostRequest(1000)))
    assert allocation.lease is None


# What there is.


def test_gpus_that_nobody_may_lease_count_nowhere(host: Host) -> None:
    everything = host.fetch()
    assert (everything.gpu_count_total, everything.gpu_units_total) == (3, 16)
    assert everything.gpu_memory_largest_free_bytes == 30 * GIB
    against: list[tuple[Callable[[], object], int]] = [
        (lambda: host.pool.slots.cordon("GPU-2", CORDON), 2),
        (lambda: host.pool.slots.set_health("GPU-1", gpu_pb2.GPU_HEALTH_ECC_FAILED, "errors"), 1),
        (lambda: host.pool.slots.observe({"GPU-0": (ForeignProcess(1, "eve", "x", GIB),)}, {}), 0),
    ]
    for act, left in against:
        act()
        fetched = host.fetch()
        assert (fetched.gpu_count_total, fetched.gpu_count_free) == (left, left)
        assert (fetched.gpu_units_total, fetched.gpu_units_free) == (4 * left, 4 * left)
    assert not host.fetch().HasField("gpu_memory_largest_free_bytes")


def test_a_cordoned_worker_allocates_nothing_more(host: Host) -> None:
    held = host.take(AllocRequest(GpuRequest(1), HostRequest(1000)))
    host.pool.slots.cordon("", CORDON)
    for request in (gpus(1), AllocRequest(host=HostRequest(1000))):
        for live in (True, False):
            assert host.refused(request, live).reason == errors_pb2.ERROR_REASON_CORDONED
    assert (host.fetch().gpu_count_total, host.fetch().cpu_millicores_free) == (0, 15_000)
    held.release()
    assert host.ledger.reservations == ()


def test_the_ledger_never_sees_strangers(host: Host) -> None:
    host.take(AllocRequest(host=HostRequest(1000)))
    with pytest.raises(OperationError):
        host.ledger.release(HostReservation("w", HostRequest(1000)))
    assert host.fetch().cpu_millicores_free == 15_000


async def test_who_waits_is_told_what_lacks_gpus_first(host: Host) -> None:
    request = AllocRequest(GpuRequest(3), HostRequest(cpu_millicores=12_000))
    gpu, cores = host.take(gpus(1), "gpu"), host.take(AllocRequest(host=HostRequest(8000)), "cores")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(host.resources.claim, "waiter", request))
        await trio.testing.wait_all_tasks_blocked()
        assert host.resources.waits_for("waiter") == request
        assert host.resources.waits_for("gpu") is None
        assert host.resources.why_not(request).reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
        assert host.resources.what_lacks(request).endswith("2 free (1 leased)")
        gpu.release()
        refusal = host.resources.why_not(request)
        assert refusal.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
        assert host.resources.what_lacks(request) == refusal.message
        assert "the request needs 12 cores of CPU time, and 8 cores of 16 cores are free" in refusal.message
        host.pool.slots.cordon("", CORDON)
        assert host.resources.why_not(request).reason == errors_pb2.ERROR_REASON_CORDONED
        assert "is cordoned" in host.resources.what_lacks(request)
        host.pool.slots.cordon("", None)
        cores.release()
    assert host.resources.waits_for("waiter") is None


async def test_who_waits_hears_that_others_took_something_of_the_host(host: Host) -> None:
    holder = host.take(gpus(3), "holder")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(host.resources.claim, "waiter", gpus(1)))
        await trio.testing.wait_all_tasks_blocked()
        before = host.pool.slots.snapshot().revision
        host.take(AllocRequest(host=HostRequest(8000)), "cores")
        assert host.pool.slots.snapshot().revision > before
        holder.release()
