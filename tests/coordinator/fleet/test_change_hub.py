"""Changes are told once, in order, and can be resumed."""

import asyncio

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import change_hub
from leasehold_coordinator.fleet.change_hub import Change, Hub, Subscription


def named(name: str) -> Workload:
    return Workload(name=name)


async def take(subscription: Subscription[Workload], count: int) -> list[Change[Workload] | None]:
    found: list[Change[Workload] | None] = []
    async for change in subscription.changes():
        found.append(change)
        if len(found) == count:
            break
    return found


def test_each_change_once_in_order() -> None:
    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        hub.publish("a", named("before"))
        with hub.subscribe() as everything, hub.subscribe("b") as only_b:
            for key, message in (("a", "a1"), ("b", "b1"), ("a", "a2")):
                hub.publish(key, named(message))
            assert [c.message.name for c in await take(everything, 3) if c] == ["a1", "b1", "a2"]
            assert [c.message.name for c in await take(only_b, 1) if c] == ["b1"]

    asyncio.run(scenario())


def test_a_resumed_watch_misses_nothing() -> None:
    hub: Hub[Workload] = Hub()
    for number in range(5):
        hub.publish("a", named(str(number)))
    assert [change.message.name for change in hub.since(hub.token(2))] == ["2", "3", "4"]
    assert hub.since(hub.token(5)) == []


def test_a_token_of_another_start_or_too_old_means_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_hub, "HISTORY_LIMIT", 2)
    hub: Hub[Workload] = Hub()
    early = hub.token(0)
    for number in range(5):
        hub.publish("a", named(str(number)))
    for token in (early, Hub[Workload]().token(1), "nonsense", hub.token(6)):
        with pytest.raises(FleetError) as error:
            hub.since(token)
        assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN
    assert len(hub.since(hub.token(3))) == 2


def test_a_watcher_that_is_too_slow_is_told_to_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_hub, "BACKLOG_LIMIT", 2)

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        with hub.subscribe() as subscription:
            for number in range(3):
                hub.publish("a", named(str(number)))
            with pytest.raises(FleetError, match="2 changes behind"):
                await take(subscription, 3)

    asyncio.run(scenario())


def test_a_watcher_is_too_slow_for_few_large_changes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_hub, "BACKLOG_BYTES", 2 * named("x" * 100).ByteSize())

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        with hub.subscribe() as subscription:
            for _ in range(5):
                hub.publish("a", named("x" * 100))
                hub.publish("a", named("x" * 100))
                await take(subscription, 2)
            for _ in range(3):
                hub.publish("a", named("x" * 100))
            with pytest.raises(FleetError, match="bytes behind"):
                await take(subscription, 3)

    asyncio.run(scenario())


def test_what_can_be_resumed_from_is_bounded_by_its_size_too() -> None:
    hub: Hub[Workload] = Hub(history_bytes=named("x" * 100).ByteSize() * 3)
    for number in range(100):
        hub.publish("a", named("x" * 100))
        oldest = max(number - 2, 0)
        assert len(hub.since(hub.token(oldest))) == min(number + 1, 3)
    with pytest.raises(FleetError):
        hub.since(hub.token(90))
    none: Hub[Workload] = Hub(history_bytes=0)
    none.publish("a", named("x"))
    assert none.since(none.token(1)) == []
    with pytest.raises(FleetError):
        none.since(none.token(0))


def test_when_something_is_gone_whoever_watches_starts_over_at_once() -> None:
    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        hub.publish("a", named("a1"))
        token = hub.token(hub.revision)
        with hub.subscribe() as subscription:
            waiting = asyncio.create_task(take(subscription, 1))
            await asyncio.sleep(0)  # it has begun
            hub.start_over("b is gone")
            hub.publish("a", named("a2"))
            with pytest.raises(FleetError, match="b is gone: watch again, from a snapshot"):
                await asyncio.wait_for(waiting, 5)
        with pytest.raises(FleetError) as error:
            hub.since(token)
        assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN
        assert hub.since(hub.token(hub.revision)) == []

    asyncio.run(scenario())


def test_a_quiet_watch_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_hub, "BOOKMARK_INTERVAL_S", 0.01)

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        with hub.subscribe() as subscription:
            assert await take(subscription, 1) == [None]

    asyncio.run(scenario())


def test_watches_do_not_end_each_time_that_something_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker with ever other GPUs must not keep everybody from watching."""

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        hub.start_over("b is gone")
        with hub.subscribe() as subscription:
            for _ in range(3):
                hub.start_over("c is gone")
                hub.tick()
            hub.publish("a", named("a1"))
            assert [change.message.name for change in await take(subscription, 1) if change] == ["a1"]
            monkeypatch.setattr(change_hub, "START_OVER_INTERVAL_S", 0.0)
            hub.tick()
            with pytest.raises(FleetError, match="c is gone: watch again, from a snapshot"):
                await asyncio.wait_for(take(subscription, 1), 5)
        with hub.subscribe() as subscription:
            hub.tick()
            hub.publish("a", named("a2"))
            assert [change.message.name for change in await take(subscription, 1) if change] == ["a2"]

    asyncio.run(scenario())
