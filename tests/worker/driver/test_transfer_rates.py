"""How long transfers are expected to take, and what is learned of it."""

import pytest
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.transfer_rates import DEADLINE_FACTOR, MOST_RATIO, PLANNED, Rates

OUT, IN = DriverCall.CHECKPOINT, DriverCall.RESTORE
GIB = 2**30
HALF_GIB = 2**29


def planned_s(call: DriverCall, moved_bytes: int) -> float:
    fixed_s, bytes_per_s = PLANNED[call]
    return fixed_s + moved_bytes / bytes_per_s


def test_nothing_seen_is_as_assumed() -> None:
    rates = Rates()
    assert rates.transfer_s("H100", OUT, 8 * GIB) == pytest.approx(planned_s(OUT, 8 * GIB))
    assert rates.basis("H100", [OUT], 8 * GIB) == ("H100: checkpoint of 8 GiB at 1.704 GiB/s (assumed)")


def test_an_estimate_is_what_was_seen() -> None:
    rates = Rates()
    rates.learn("H100", OUT, HALF_GIB, 0.42)
    assert rates.transfer_s("H100", OUT, HALF_GIB) == pytest.approx(0.42)
    assert rates.basis("H100", [OUT, IN], HALF_GIB) == (
        "H100: checkpoint of 512 MiB at 1.19 GiB/s (as seen here), "
        "restore of 512 MiB at 807.3 MiB/s (assumed)"
    )
    assert rates.transfer_s("H100", OUT, 64 * GIB) == pytest.approx(
        planned_s(OUT, 64 * GIB) * 0.42 / planned_s(OUT, HALF_GIB)
    )


def test_a_time_is_learned_for_one_chip_and_one_direction() -> None:
    rates = Rates()
    rates.learn("H100", OUT, 8 * GIB, 1.5)
    assert rates.transfer_s("H100", IN, 8 * GIB) == planned_s(IN, 8 * GIB)
    assert rates.transfer_s("A100", OUT, 8 * GIB) == planned_s(OUT, 8 * GIB)


def test_the_newest_transfers_count_most() -> None:
    rates = Rates()
    rates.learn("H100", OUT, 8 * GIB, 2.0)
    rates.learn("H100", OUT, 8 * GIB, 4.0)
    assert 2.0 < rates.transfer_s("H100", OUT, 8 * GIB) < 4.0
    for _ in range(20):
        rates.learn("H100", OUT, 8 * GIB, 4.0)
    assert rates.transfer_s("H100", OUT, 8 * GIB) == pytest.approx(4.0, rel=0.01)


def test_small_transfers_tell_nothing_of_large_ones() -> None:
    rates = Rates()
    rates.learn("H100", OUT, 1000, 3.0)
    assert rates.transfer_s("H100", OUT, 1000) == pytest.approx(3.0)
    assert rates.transfer_s("H100", OUT, 8 * GIB) == planned_s(OUT, 8 * GIB)


def test_one_stall_does_not_make_deadlines_endless() -> None:
    rates = Rates()
    for _ in range(20):
        rates.learn("H100", OUT, GIB, 1e9)
    assert rates.transfer_s("H100", OUT, GIB) <= MOST_RATIO * planned_s(OUT, GIB)


def test_a_deadline_is_a_multiple_of_the_expected_time() -> None:
    rates = Rates()
    assert rates.extra_s("H100", OUT, GIB) == DEADLINE_FACTOR * rates.transfer_s("H100", OUT, GIB)
