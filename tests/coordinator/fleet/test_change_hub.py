"""Changes are told once, in order, and can be resumed."""

import asyncio
import time

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
    assert list(hub.since(hub.token(5))) == []


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
    assert len(list(hub.since(hub.token(3)))) == 2


def test_resumed_watchers_that_read_nothing_share_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once held the parsed messages of the whole history: 500 watchers took gigabytes."""
    monkeypatch.setattr(change_hub, "HISTORY_LIMIT", 3)
    hub: Hub[Workload] = Hub()
    for number in range(3):
        hub.publish("a", named(str(number)))
    idle, begun = hub.since(hub.token(0)), hub.since(hub.token(1))
    assert next(begun).message.name == "1"
    hub.publish("a", named("3"))
    assert [change.message.name for change in begun] == ["2"], "what came later comes by the subscription"
    with pytest.raises(FleetError) as error:
        next(idle)
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN


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
        assert len(list(hub.since(hub.token(oldest)))) == min(number + 1, 3)
    with pytest.raises(FleetError):
        hub.since(hub.token(90))
    none: Hub[Workload] = Hub(history_bytes=0)
    none.publish("a", named("x"))
    assert list(none.since(none.token(1))) == []
    with pytest.raises(FleetError):
        none.since(none.token(0))


def test_what_waits_of_a_key_is_dropped_for_its_newest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_hub, "BACKLOG_BYTES", 5 * named("a1").ByteSize())

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        with hub.subscribe() as subscription:
            for key, message in (("a", "a1"), ("b", "b1"), ("a", "a2")):
                hub.publish(key, named(message))
            subscription.drop("a")
            subscription.drop("c")
            for key, message in (("a", "a3"), ("a", "a4"), ("b", "b2"), ("b", "b3")):
                hub.publish(
                    key, named(message)
                )  # none is too many: the bytes of those that were dropped count no more
            assert [c.message.name for c in subscription.until(5)] == ["b1", "a3", "a4"]
            assert [c.message.name for c in await take(subscription, 2) if c] == ["b2", "b3"]

    asyncio.run(scenario())


def test_a_quiet_watch_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_hub, "BOOKMARK_INTERVAL_S", 0.01)

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        with hub.subscribe() as subscription:
            assert await take(subscription, 1) == [None]

    asyncio.run(scenario())


def test_a_change_in_the_turn_that_ends_a_quiet_time_comes_before_the_bookmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token of the bookmark would cover a change that the watcher has not got."""
    monkeypatch.setattr(change_hub, "BOOKMARK_INTERVAL_S", 0.01)

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        with hub.subscribe() as subscription:
            taking = asyncio.create_task(take(subscription, 1))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.02, hub.publish, "a", named("a1"))
            time.sleep(0.05)  # noqa: ASYNC251 - both timers are due in one turn of the loop
            [change] = await taking
            assert change is not None
            assert change.message.name == "a1"

    asyncio.run(scenario())
