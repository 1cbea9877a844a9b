"""The ledger of CPU time, memory and disk."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.worker_pb2 import MachineResources
from leasehold_worker.errors import OperationError
from leasehold_worker.files.volume import DiskSpace
from leasehold_worker.host.capacity import HostLimits
from leasehold_worker.leasing.host_reservations import (
    HostRequest,
    HostReservation,
    HostReservations,
)

GIB = 2**30
LIMITS = HostLimits(16_000, 64 * GIB)


@dataclass
class Host:
    """A ledger over a volume and parked memory that tests set."""

    volume: DiskSpace | OSError
    parked_bytes: int = 0

    def disk(self) -> DiskSpace:
        if isinstance(self.volume, OSError):
            raise self.volume
        return self.volume

    def ledger(
        self, disk_reserve_bytes: int = 0, on_change: Callable[[], None] = lambda: None
    ) -> HostReservations:
        return HostReservations(LIMITS, self.disk, lambda: self.parked_bytes, on_change, disk_reserve_bytes)


@pytest.fixture
def host() -> Host:
    return Host(DiskSpace(1000 * GIB, 500 * GIB))


def refusal(act: Callable[[], object]) -> OperationError:
    with pytest.raises(OperationError) as refused:
        act()
    return refused.value


def figures(cpu_free: int, memory_free: int, disk_free: int) -> MachineResources:
    """Those of the whole host, with these free amounts."""
    return MachineResources(
        cpu_millicores_total=16_000,
        cpu_millicores_free=cpu_free,
        memory_total_bytes=64 * GIB,
        memory_free_bytes=memory_free,
        disk_total_bytes=1000 * GIB,
        disk_free_bytes=disk_free,
    )


def test_what_is_reserved_is_not_free_until_it_is_released(host: Host) -> None:
    ledger = host.ledger()
    assert ledger.figures() == figures(16_000, 64 * GIB, 400 * GIB)
    held = ledger.reserve("a", HostRequest(4000, 8 * GIB, 100 * GIB))
    assert list(ledger.reservations) == [held]
    assert ledger.figures() == figures(12_000, 56 * GIB, 300 * GIB)
    ledger.release(held)
    assert not ledger.reservations
    assert ledger.figures() == figures(16_000, 64 * GIB, 400 * GIB)


@pytest.mark.parametrize(
    ("request_", "field", "wanted", "free", "text"),
    [
        (HostRequest(cpu_millicores=12_001), "cpu_millicores", 12_001, 12_000, "12.001 cores of CPU time"),
        (HostRequest(memory_bytes=57 * GIB), "memory_bytes", 57 * GIB, 56 * GIB, "56 GiB of 64 GiB are free"),
        (
            HostRequest(disk_bytes=301 * GIB),
            "disk_bytes",
            301 * GIB,
            300 * GIB,
            "100 GiB kept as the reserve",
        ),
        (HostRequest(99_000, 57 * GIB, 0), "cpu_millicores", 99_000, 12_000, "has at most 16 cores"),
        (
            HostRequest(12_001, 999 * GIB, 0),
            "memory_bytes",
            999 * GIB,
            56 * GIB,
            "has at most 64 GiB",
        ),
    ],
)
def test_too_much_is_refused_with_the_figures(
    host: Host, request_: HostRequest, field: str, wanted: int, free: int, text: str
) -> None:
    ledger = host.ledger()
    ledger.reserve("a", HostRequest(4000, 8 * GIB, 100 * GIB))
    before = ledger.figures()
    for act in (ledger.check, lambda request: ledger.reserve("b", request)):
        error = refusal(lambda act=act: act(request_))  # type: ignore[misc]
        assert error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
        assert (error.metadata["field"], error.metadata["wanted"]) == (field, str(wanted))
        assert error.metadata["free"] == str(free)
        assert text in error.message
    assert ledger.figures() == before


def test_who_may_wait_is_told_what_is_free_and_who_waits_for_nothing_is_refused(host: Host) -> None:
    ledger = host.ledger()
    ledger.reserve("a", HostRequest(cpu_millicores=10_000))
    assert refusal(lambda: ledger.reserve("b", HostRequest(cpu_millicores=6001))).metadata["free"] == "6000"
    ledger.check_possible(HostRequest(cpu_millicores=6001))
    assert refusal(lambda: ledger.check_possible(HostRequest(16_001))).metadata["most"] == "16000"
    assert refusal(lambda: ledger.check_possible(HostRequest(disk_bytes=901 * GIB))).metadata["most"] == str(
        900 * GIB
    )
    ledger.check_possible(HostRequest(16_000, 64 * GIB, 900 * GIB))
    ledger.reserve("b", HostRequest(cpu_millicores=6000))


def test_a_second_release_is_an_error_and_changes_nothing(host: Host) -> None:
    ledger = host.ledger()
    one, two = (ledger.reserve(name, HostRequest(1000)) for name in ("a", "b"))
    ledger.release(one)
    for stranger in (
        one,
        HostReservation("b", HostRequest(1000)),
        host.ledger().reserve("b", HostRequest(1)),
    ):
        assert refusal(lambda it=stranger: ledger.release(it)).reason == (  # type: ignore[misc]
            errors_pb2.ERROR_REASON_ALREADY_RELEASED
        )
    assert ledger.reservations == (two,)


def test_parked_memory_is_charged(host: Host) -> None:
    ledger = host.ledger()
    host.parked_bytes = 50 * GIB
    assert ledger.figures().memory_free_bytes == 14 * GIB
    error = refusal(lambda: ledger.reserve("a", HostRequest(memory_bytes=15 * GIB)))
    assert "14 GiB of 64 GiB are free, with 50 GiB taken by suspended workloads" in error.message
    host.parked_bytes = 100 * GIB
    assert ledger.figures().memory_free_bytes == 0


def test_what_is_taken_back_may_be_too_much(host: Host) -> None:
    ledger = host.ledger()
    held = ledger.take_back("a", HostRequest(20_000, 100 * GIB, 999 * GIB))
    figures = ledger.figures()
    assert (figures.cpu_millicores_free, figures.memory_free_bytes, figures.disk_free_bytes) == (0, 0, 0)
    ledger.reserve("nothing", HostRequest())
    ledger.release(held)
    assert ledger.figures().cpu_millicores_free == 16_000


def test_disk_keeps_a_tenth_or_what_is_configured(host: Host) -> None:
    assert host.ledger().figures().disk_free_bytes == 400 * GIB
    assert host.ledger(99 * GIB).figures().disk_free_bytes == 400 * GIB
    assert host.ledger(150 * GIB).figures().disk_free_bytes == 350 * GIB
    assert host.ledger(600 * GIB).figures().disk_free_bytes == 0
    error = refusal(lambda: host.ledger(2000 * GIB).reserve("a", HostRequest(disk_bytes=1)))
    assert error.metadata["most"] == "0"


def test_disk_that_is_written_counts_once(host: Host) -> None:
    ledger = host.ledger()
    held = ledger.reserve("a", HostRequest(disk_bytes=100 * GIB))
    host.volume = DiskSpace(1000 * GIB, 460 * GIB)
    assert ledger.figures().disk_free_bytes == 260 * GIB
    ledger.set_written(held, 40 * GIB)
    assert ledger.figures().disk_free_bytes == 300 * GIB
    host.volume = DiskSpace(1000 * GIB, 300 * GIB)
    ledger.set_written(held, 200 * GIB)
    assert ledger.figures().disk_free_bytes == 200 * GIB
    ledger.release(held)
    ledger.set_written(held, 1)
    assert ledger.reservations == ()


def test_a_volume_that_can_not_be_read_refuses_disk_alone(host: Host) -> None:
    ledger = host.ledger()
    host.volume = OSError(5, "Input/output error")
    assert (ledger.figures().disk_total_bytes, ledger.figures().disk_free_bytes) == (0, 0)
    for act in (ledger.check, partial(ledger.reserve, "a")):
        error = refusal(lambda act=act: act(HostRequest(1000, GIB, 1)))  # type: ignore[misc]
        assert "can't be read (Input/output error)" in error.message
        assert error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
        assert error.metadata["field"] == "disk_bytes"
    ledger.release(ledger.reserve("a", HostRequest(1000, GIB)))


def test_nothing_negative_can_be_asked_for() -> None:
    for name in ("cpu_millicores", "memory_bytes", "disk_bytes"):
        error = refusal(lambda name=name: HostRequest(**{name: -1}))  # type: ignore[misc]
        assert error.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
        assert error.metadata == {"field": name}


def test_who_waits_is_told_once_something_was_released(host: Host) -> None:
    served: list[HostReservation] = []
    ledger = host.ledger(
        on_change=lambda: served.append(ledger.reserve("b", HostRequest(cpu_millicores=16_000)))
    )
    held = ledger.reserve("a", HostRequest(cpu_millicores=16_000))
    ledger.release(held)
    assert [reservation.holder for reservation in ledger.reservations] == ["b"]
    assert len(served) == 1
