"""A worker may send a burst of frames, and then its rate."""

import pytest
from leasehold_coordinator.core.frame_pace import (
    BYTE_BURST,
    BYTES_PER_S,
    FRAME_BURST,
    FRAMES_PER_S,
    FramePace,
)
from leasehold_coordinator.core.known_worker import SessionId
from leasehold_coordinator.core.worker_registry import Registry

from tests.coordinator.scripted_worker import make_hello


def test_a_burst_is_read_at_once() -> None:
    pace = FramePace()
    assert all(pace.delay_s(100, 1000.0) == 0 for _ in range(FRAME_BURST))
    assert pace.delay_s(100, 1000.0) == pytest.approx(1 / FRAMES_PER_S)
    assert pace.delay_s(100, 1000.0) == pytest.approx(2 / FRAMES_PER_S)


def test_a_steady_sender_is_held_to_its_rate() -> None:
    pace, now = FramePace(), 0.0
    for _ in range(4 * FRAME_BURST):
        now += pace.delay_s(100, now)
    assert now == pytest.approx(3 * FRAME_BURST / FRAMES_PER_S)


def test_bytes_count_too() -> None:
    pace, now, size_bytes = FramePace(), 0.0, 256 * 1024
    for _ in range(2 * BYTE_BURST // size_bytes):
        now += pace.delay_s(size_bytes, now)
    assert now == pytest.approx(BYTE_BURST / BYTES_PER_S)


def test_a_pause_gives_the_burst_back() -> None:
    pace = FramePace()
    for _ in range(2 * FRAME_BURST):
        pace.delay_s(100, 0.0)
    assert pace.delay_s(100, 2 * FRAME_BURST / FRAMES_PER_S) == 0


def test_a_clock_that_stands_still_or_goes_back_harms_nothing() -> None:
    pace = FramePace()
    pace.delay_s(100, 10.0)
    assert pace.delay_s(100, 9.0) == 0


def test_a_new_session_is_no_new_allowance() -> None:
    registry = Registry(load_interval_s=5.0, started=0.0)
    first = registry.welcome(make_hello(), 1, SessionId("one"), 1.0, 1)
    for _ in range(2 * FRAME_BURST):
        first.pace.delay_s(100, 1.0)
    second = registry.welcome(make_hello(), 2, SessionId("two"), 1.0, 1)
    assert second.pace.delay_s(100, 1.0) > 0
