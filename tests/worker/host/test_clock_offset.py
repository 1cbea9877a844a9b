"""The offset of the coordinator's clock, from the times of question and answer."""

import pytest
from leasehold_worker.host.clock_offset import ClockOffset


@pytest.mark.parametrize(
    ("coordinator_s", "expected_s"),
    [(None, None), (100.0, 0.0), (107.0, 0.0), (120.0, 0.0), (121.5, 1.5), (90.0, -10.0)],
)
def test_a_slow_answer_is_no_offset(coordinator_s: float | None, expected_s: float | None) -> None:
    clock = ClockOffset()
    clock.measure(0.0, 50.0, 0.0)
    clock.measure(100.0, coordinator_s, 120.0)
    assert clock.offset_s == expected_s


@pytest.mark.parametrize(
    ("offset_s", "words"), [(5.0, None), (6.0, "6.0 s ahead of"), (-6.0, "6.0 s behind")]
)
def test_a_large_offset_is_logged(
    caplog: pytest.LogCaptureFixture, offset_s: float, words: str | None
) -> None:
    ClockOffset().measure(100.0, 100.0 + offset_s, 100.0)
    assert (words in caplog.text) if words else (caplog.text == "")
