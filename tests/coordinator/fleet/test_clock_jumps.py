"""A jump of the clock is told, and a later time can be forgotten."""

from pathlib import Path

import pytest
from leasehold.v1 import event_pb2
from leasehold_coordinator.fleet import clock_jumps
from leasehold_coordinator.fleet.clock_jumps import ClockJumps
from leasehold_coordinator.storage.rows import clock_row
from leasehold_coordinator.storage.store import Store

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.pages import all_events
from tests.coordinator.storage.test_store import with_store

HOUR_NS = 3_600 * 10**9


def test_a_jump_of_more_than_an_hour_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumped = [0]
    monkeypatch.setattr(clock_jumps, "jumped_ns", lambda: jumped[0])

    async def scenario(bench: Bench) -> None:
        jumps = ClockJumps(bench.fleet.events, bench.store)
        for jumped[0] in (HOUR_NS, 0, 2 * HOUR_NS, 2 * HOUR_NS, 0):
            jumps.check()
        await bench.fleet.events.flush()
        events = await all_events(bench.store)
        assert {event.kind for event in events} == {event_pb2.EVENT_KIND_CLOCK_JUMPED}
        assert [event.message.split(" jumped ")[1].split(" by ")[0] for event in events] == [
            "back",
            "forward",
        ]

    on_bench(tmp_path, scenario)


def test_a_store_from_the_future_is_told_and_can_be_corrected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.sqlite3"

    async def jump(store: Store) -> None:
        await store.write(clock_row(store.highest_time_ns + 2 * HOUR_NS))

    async def read(store: Store) -> None:
        ClockJumps(Bench(store).fleet.events, store)
        (told,) = caplog.messages
        assert "set the clock, or accept it by the setting clock_corrected" in told
        store.forget_later_time()
        ClockJumps(Bench(store).fleet.events, store)
        assert caplog.messages == [told]

    with_store(path, jump)
    with_store(path, read)
