"""Changes are told once, in order, and can be resumed."""

import asyncio

import pytest
from leasehold.v1 import errors_pb2
from leasehold_coordinator import watch
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.watch import Change, Hub, Subscription


async def take(subscription: Subscription[str], count: int) -> list[Change[str] | None]:
    found: list[Change[str] | None] = []
    async for change in subscription.changes():
        found.append(change)
        if len(found) == count:
            break
    return found


def test_each_change_once_in_order() -> None:
    async def scenario() -> None:
        hub: Hub[str] = Hub()
        hub.publish("a", "before")
        with hub.subscribe() as everything, hub.subscribe("b") as only_b:
            for key, message in (("a", "a1"), ("b", "b1"), ("a", "a2")):
                hub.publish(key, message)
            assert [c.message for c in await take(everything, 3) if c] == ["a1", "b1", "a2"]
            assert [c.message for c in await take(only_b, 1) if c] == ["b1"]

    asyncio.run(scenario())


def test_a_resumed_watch_misses_nothing() -> None:
    hub: Hub[str] = Hub()
    for number in range(5):
        hub.publish("a", str(number))
    assert [change.message for change in hub.since(hub.token(2))] == ["2", "3", "4"]
    assert hub.since(hub.token(5)) == []


def test_a_token_of_another_start_or_too_old_means_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HISTORY_LIMIT", 2)
    hub: Hub[str] = Hub()
    early = hub.token(0)
    for number in range(5):
        hub.publish("a", str(number))
    for token in (early, Hub[str]().token(1), "nonsense", hub.token(6)):
        with pytest.raises(FleetError) as error:
            hub.since(token)
        assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN
    assert len(hub.since(hub.token(3))) == 2


def test_a_watcher_that_is_too_slow_is_told_to_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BACKLOG_LIMIT", 2)

    async def scenario() -> None:
        hub: Hub[str] = Hub()
        with hub.subscribe() as subscription:
            for number in range(3):
                hub.publish("a", str(number))
            with pytest.raises(FleetError, match="2 changes behind"):
                await take(subscription, 3)

    asyncio.run(scenario())


def test_a_quiet_watch_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BOOKMARK_INTERVAL_S", 0.01)

    async def scenario() -> None:
        hub: Hub[str] = Hub()
        with hub.subscribe() as subscription:
            assert await take(subscription, 1) == [None]

    asyncio.run(scenario())
