"""Allocations against a plain model, in every order that hypothesis comes upon.

The ledgers are the real ones. The volume and the parked memory change as they like meanwhile.
"""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from leasehold.v1 import errors_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.files.volume import DiskSpace
from leasehold_worker.host.capacity import HostLimits
from leasehold_worker.leasing.allocation import Allocation, AllocRequest, Preview, Resources
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.host_reservations import HostRequest, HostReservations
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool

from tests import environment

CPU, MEMORY, DISK, GPUS = 8, 16, 100, 4
KEPT_FREE = 10
ALREADY_RELEASED = errors_pb2.ERROR_REASON_ALREADY_RELEASED
EXPECTED = {errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES, errors_pb2.ERROR_REASON_NO_FREE_GPU}

host_requests = st.builds(
    HostRequest, st.integers(0, CPU + 1), st.integers(0, MEMORY + 1), st.integers(0, DISK + 1)
)
requests = st.builds(AllocRequest, st.builds(GpuRequest, st.integers(0, GPUS + 1)), host_requests)


@dataclass(eq=False)
class Held:
    """What the model believes that somebody holds."""

    allocation: Allocation
    request: HostRequest
    gpus: int
    handed_over: Lease | None = None
    written: int = 0
    live: bool = True


class Ledger(RuleBasedStateMachine):
    """Somebody allocates, releases, hands leases over and writes; others park, and fill the volume."""

    held: Bundle[Held] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.available: int | None = DISK
        self.parked = 0
        self.known: list[Held] = []
        self.pool = GpuPool([PoolGpu(f"GPU-{slot}") for slot in range(GPUS)])
        self.ledger = HostReservations(
            HostLimits(CPU, MEMORY), self.read_volume, lambda: self.parked, self.pool.note_host, 7
        )
        self.resources = Resources(self.pool, self.ledger)

    def read_volume(self) -> DiskSpace:
        if self.available is None:
            raise OSError(5, "Input/output error")
        return DiskSpace(DISK, self.available)

    # What the model expects.

    @property
    def live(self) -> list[Held]:
        return [held for held in self.known if held.live]

    def free(self) -> tuple[int, int, int, int]:
        """CPU, memory, disk and GPUs, in whole figures that may be negative."""
        unwritten = sum(max(0, held.request.disk_bytes - held.written) for held in self.live)
        disk = 0 if self.available is None else self.available - KEPT_FREE - unwritten
        leased = sum(held.gpus for held in self.known if held.live or held.handed_over)
        return (
            CPU - sum(held.request.cpu_millicores for held in self.live),
            MEMORY - sum(held.request.memory_bytes for held in self.live) - self.parked,
            disk,
            GPUS - leased,
        )

    def fits(self, request: AllocRequest) -> bool:
        host = request.host
        wanted = (host.cpu_millicores, host.memory_bytes, host.disk_bytes, request.gpus.count)
        return all(want <= max(0, have) for want, have in zip(wanted, self.free(), strict=True))

    # What happens.

    @rule(target=held, request=requests)
    def allocate(self, request: AllocRequest) -> Held | MultipleResults[Held]:
        if not self.fits(request):
            for refuse in (self.preview, self.allocation):
                with pytest.raises(OperationError) as refused:
                    refuse(request)
                assert refused.value.reason in EXPECTED
            return multiple()
        preview, allocation = self.preview(request), self.allocation(request)
        assert preview == Preview(allocation.lease.gpu_uuids if allocation.lease else (), request.host)
        return self.know(Held(allocation, request.host, request.gpus.count))

    def preview(self, request: AllocRequest) -> Preview:
        return self.resources.alloc("w", request, live=False)

    def allocation(self, request: AllocRequest) -> Allocation:
        return self.resources.alloc("w", request, live=True)

    @rule(target=held, request=host_requests)
    def take_back(self, request: HostRequest) -> Held:
        return self.know(
            Held(
                Allocation("w", None, self.ledger.take_back("w", request), self.pool, self.ledger), request, 0
            )
        )

    def know(self, held: Held) -> Held:
        self.known.append(held)
        return held

    @rule(held=held)
    def release(self, held: Held) -> None:
        if held.live:
            held.live = False
            held.allocation.release()
            return
        with pytest.raises(OperationError) as refused:
            held.allocation.release()
        assert refused.value.reason == ALREADY_RELEASED
        with pytest.raises(OperationError) as refused:
            self.ledger.release(held.allocation.host)
        assert refused.value.reason == ALREADY_RELEASED

    @rule(held=held)
    def release_behind_its_back(self, held: Held) -> None:
        """Somebody releases a part alone: the whole says so, and gives the rest back."""
        if not held.live:
            return
        self.ledger.release(held.allocation.host)
        held.live = False
        with pytest.raises(ExceptionGroup) as failed:
            held.allocation.release()
        assert len(failed.value.exceptions) == 1

    @rule(held=held)
    def hand_over(self, held: Held) -> None:
        lease = held.allocation.hand_over_lease()
        if held.live and held.handed_over is None and lease is not None:
            held.handed_over = lease
        else:
            assert lease is None

    @rule(held=held)
    def give_handed_over_back(self, held: Held) -> None:
        if held.handed_over is not None:
            assert self.pool.release(held.handed_over)
            held.handed_over, held.gpus = None, 0

    @rule(held=held, written=st.integers(-1, DISK))
    def write(self, held: Held, written: int) -> None:
        self.ledger.set_written(held.allocation.host, written)
        held.written = max(0, written)

    @rule(parked=st.integers(0, MEMORY * 2))
    def park(self, parked: int) -> None:
        self.parked = parked

    @rule(available=st.none() | st.integers(0, DISK))
    def fill(self, available: int | None) -> None:
        self.available = available

    # What always holds.

    @invariant()
    def what_is_free_is_what_nobody_holds(self) -> None:
        fetched = self.resources.fetch_machine_resources()
        assert (
            fetched.cpu_millicores_free,
            fetched.memory_free_bytes,
            fetched.disk_free_bytes,
            fetched.gpu_count_free,
        ) == tuple(max(0, figure) for figure in self.free())
        assert fetched.cpu_millicores_free <= fetched.cpu_millicores_total
        assert fetched.memory_free_bytes <= fetched.memory_total_bytes
        assert fetched.disk_free_bytes <= fetched.disk_total_bytes
        assert {id(reservation) for reservation in self.ledger.reservations} == {
            id(held.allocation.host) for held in self.live
        }


SETTINGS = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.long
def test_the_ledger_agrees_with_its_model() -> None:
    run_machine(Ledger, settings=SETTINGS)


@pytest.mark.long
@pytest.mark.minutes
def test_the_ledger_agrees_with_its_model_in_a_large_sample() -> None:
    run_machine(seed(environment.seed())(Ledger), settings=settings(SETTINGS, max_examples=1500))
