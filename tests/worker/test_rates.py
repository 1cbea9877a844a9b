"""How long transfers are expected to take, and what is learned of it."""

import pytest
from leasehold_worker.checkpoint.helper_protocol import DriverCall
from leasehold_worker.checkpoint.rates import DEADLINE_FACTOR, LEAST_RATE, PLANNED, Rates

OUT, IN = DriverCall.CHECKPOINT, DriverCall.RESTORE
GIB = 2**30


def test_nothing_learned_is_as_planned() -> None:
    rates = Rates()
    fixed_s, bytes_per_s = PLANNED[OUT]
    assert rates.transfer_s("H100", OUT, 8 * GIB) == pytest.approx(fixed_s + 8 * GIB / bytes_per_s)
    assert "planned" in rates.basis("H100", [OUT])


def test_a_rate_is_learned_for_one_chip_and_one_direction() -> None:
    rates = Rates()
    planned = rates.transfer_s("H100", IN, 8 * GIB)
    rates.learn("H100", OUT, 8 * GIB, PLANNED[OUT][0] + 1)
    assert rates.transfer_s("H100", OUT, 16 * GIB) == pytest.approx(PLANNED[OUT][0] + 2)
    assert rates.transfer_s("H100", IN, 8 * GIB) == planned
    assert rates.transfer_s("A100", OUT, 8 * GIB) > PLANNED[OUT][0] + 2
    assert "learned from 1" in rates.basis("H100", [OUT])


def test_small_transfers_tell_the_fixed_time_and_not_the_rate() -> None:
    rates = Rates()
    rates.learn("H100", OUT, 1000, 3.0)
    assert rates.transfer_s("H100", OUT, 0) == pytest.approx(3.0)
    assert rates.transfer_s("H100", OUT, 2 * 10**9) == pytest.approx(4.0)


def test_one_stall_does_not_make_deadlines_endless() -> None:
    rates = Rates()
    for _ in range(20):
        rates.learn("H100", OUT, GIB, 1e9)
    assert rates.transfer_s("H100", OUT, 0) + GIB / LEAST_RATE >= rates.transfer_s("H100", OUT, GIB)


def test_a_deadline_is_a_multiple_of_the_expected_time() -> None:
    rates = Rates()
    assert rates.extra_s("H100", OUT, GIB) == DEADLINE_FACTOR * rates.transfer_s("H100", OUT, GIB)
