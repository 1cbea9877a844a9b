"""An allowance grants its burst at once, and then its rate."""

from leasehold_coordinator.core.allowance import Allowance


def test_a_burst_and_then_the_rate() -> None:
    allowance = Allowance(10, 5)
    assert [allowance.take(1, 100.0) for _ in range(6)] == [0, 0, 0, 0, 0, 0.1]
    assert allowance.take(1, 100.05) > 0
    assert allowance.take(1, 100.11) == 0
    assert not allowance.is_full(100.2)
    assert allowance.is_full(101.0)
    assert [allowance.take(1, 200.0) for _ in range(6)].count(0) == 5, (
        "a pause saves up no more than the burst"
    )


def test_a_debt_must_be_regained_first() -> None:
    allowance = Allowance(10, 5)
    allowance.charge(15, 100.0)
    assert allowance.take(1, 100.0) == 1.1
    assert allowance.take(1, 101.2) == 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    allowance = Allowance(10, 5)
    allowance.charge(5, 100.0)
    assert allowance.take(1, 50.0) > 0
