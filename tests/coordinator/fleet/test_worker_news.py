"""Events of workers: a worker whose reports change all the time displaces no events of others."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from leasehold.v1 import event_pb2, gpu_pb2, lease_pb2, workload_pb2
from leasehold.v1.event_pb2 import Event
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.worker.v1.session_pb2 import WorkerLoad
from leasehold_coordinator.core.known_worker import SessionId
from leasehold_coordinator.fleet import event_log, worker_news

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.pages import all_events
from tests.coordinator.scripted_worker import make_hello

HEALTHS = (gpu_pb2.GPU_HEALTH_XID_ERROR, gpu_pb2.GPU_HEALTH_OK)


def told_in_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[[Bench, str, int], Awaitable[None]]
) -> list[Event]:
    """The events, once beta has reported something and alpha something else 1,000 times."""
    now, began = 0.0, time.monotonic()
    monkeypatch.setattr(
        time, "monotonic", lambda: began + now
    )  # a slow machine gives a worker no more events
    told: list[Event] = []

    async def scenario(bench: Bench) -> None:
        nonlocal now
        for name in ("alpha", "beta"):
            bench.fleet.registry.add_stored(make_hello(name), 1)
        await report(bench, "beta", 0)
        for number in range(1_000):
            await report(bench, "alpha", number)
        now += 60
        await report(bench, "alpha", 1_000)
        await bench.fleet.events.flush()
        told.extend(await all_events(bench.store))

    on_bench(tmp_path, scenario)
    return told


def require_room_for_others(told: list[Event]) -> None:
    """One worker's flood has an event with the number of changes left out, and keeps others' events."""
    assert any(event.worker_id == "worker-beta" for event in told)
    assert len(told) < 150
    assert any("earlier changes have no event" in event.message for event in told)


@pytest.mark.long
def test_changing_workloads_displace_no_events_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "WORKLOAD_EVENT_BURST", 50)
    states = (workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_SUSPENDED)

    async def report(bench: Bench, name: str, number: int) -> None:
        status = WorkloadStatus(state=states[number % 2], generation=number + 1)
        workload = Workload(workload_id=f"w-{name}", worker_id=f"worker-{name}", status=status)
        await bench.fleet.save_workloads([workload])

    require_room_for_others(told_in_a_flood(tmp_path, monkeypatch, report))


def test_connections_displace_no_events_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_news, "EVENT_BURST", 50)

    async def report(bench: Bench, name: str, number: int) -> None:
        known = bench.fleet.registry.find(name)
        known.reported, known.left = True, bool(number % 2)
        bench.fleet.worker_news.publish(known)

    require_room_for_others(told_in_a_flood(tmp_path, monkeypatch, report))


def test_flapping_gpus_displace_no_events_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_news, "EVENT_BURST", 50)

    async def report(bench: Bench, name: str, number: int) -> None:
        registry = bench.fleet.registry
        known = registry.find(name)
        leases = [
            GpuLease(gpu_uuid=gpu.uuid, state=lease_pb2.SLOT_STATE_FREE, health=HEALTHS[number % 2])
            for gpu in known.hello.gpus
        ]
        assert registry.apply_load(known, WorkerLoad(sequence=number + 1, gpu_leases=leases))
        bench.fleet.worker_news.publish(known)

    told = told_in_a_flood(tmp_path, monkeypatch, report)
    require_room_for_others([event for event in told if event.kind == event_pb2.EVENT_KIND_GPU_HEALTH])


def test_after_a_start_a_cordon_has_no_event_again_and_a_bad_health_one_that_says_so(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        await bench.fleet.save_worker(make_hello(), 1)

    async def after(bench: Bench) -> None:
        await bench.fleet.load()
        for number in range(2):
            hello = make_hello()
            hello.gpu_leases[0].cordon.reason = "a fan"
            hello.gpu_leases[0].health = HEALTHS[number]
            known = bench.fleet.registry.welcome(
                hello, 1, SessionId(f"s-{number}"), time.monotonic(), time.time_ns()
            )
            bench.fleet.worker_news.publish(known)
        hello.gpu_leases[0].ClearField("cordon")
        hello.gpu_leases[0].health = HEALTHS[0]
        bench.fleet.registry.apply_load(known, WorkerLoad(sequence=9, gpu_leases=hello.gpu_leases))
        bench.fleet.worker_news.publish(known)
        await bench.fleet.events.flush()
        told = [one.message for one in await all_events(bench.store) if "GPU alpha/0" in one.message]
        assert sorted(told) == [
            "GPU alpha/0 is OK again",
            "GPU alpha/0 is XID_ERROR",
            "GPU alpha/0 is XID_ERROR; the condition may be older than the start of the coordinator",
            "GPU alpha/0 is back in service",
        ]

    on_bench(tmp_path, before)
    on_bench(tmp_path, after)


def test_workloads_whose_contact_changed_are_published_some_in_each_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_news, "WORKLOADS_PER_TICK", 2)

    async def scenario(bench: Bench) -> None:
        fleet, hub, told = bench.fleet, bench.fleet.reader.workload_hub, bench.fleet.worker_news
        for number in range(4):
            status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1)
            running = Workload(workload_id=f"w-{number}", worker_id="worker-alpha", status=status)
            await fleet.save_workloads([running])
        fleet.registry.welcome(make_hello(), 1, SessionId("s-1"), time.monotonic(), time.time_ns())
        known = fleet.registry.find("alpha")
        with hub.subscribe() as subscription:

            def published() -> list[tuple[str, bool]]:
                told.publish_due_workloads()
                messages = [change.message.workload for change in subscription.until(hub.revision)]
                return [(one.workload_id, one.out_of_contact) for one in messages]

            told.publish(known)
            assert published() == [("w-0", False), ("w-1", False)]
            ended = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_EXITED, generation=2)
            await fleet.save_workloads([Workload(workload_id="w-2", worker_id="worker-alpha", status=ended)])
            assert published() == [("w-2", False), ("w-3", False)], "one of them by its end"
            told.publish(known)
            assert not published(), "the contact is as before"
            known.left = True
            told.publish(known)
            told.publish(known)
            assert [*published(), *published()] == [("w-0", True), ("w-1", True), ("w-3", True)]

    on_bench(tmp_path, scenario)


def test_a_start_repeats_no_event_of_an_earlier_goodbye(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.fleet.registry.add_stored(make_hello("alpha"), 1, left=True)
        bench.fleet.worker_news.publish_silent_workers()
        await bench.fleet.events.flush()
        assert not await all_events(bench.store)
        back = bench.fleet.registry.welcome(
            make_hello("alpha"), 2, SessionId("s-2"), time.monotonic(), time.time_ns()
        )
        bench.fleet.worker_news.publish(back)
        back.left = True
        bench.fleet.worker_news.publish(back)
        await bench.fleet.events.flush()
        kinds = [event.kind for event in await all_events(bench.store)]
        assert sorted(kinds) == [event_pb2.EVENT_KIND_WORKER_CONNECTED, event_pb2.EVENT_KIND_WORKER_LEFT]

    on_bench(tmp_path, scenario)


def test_a_workload_has_the_time_of_the_last_report_that_is_stored(tmp_path: Path) -> None:
    """A worker whose reports the store refuses connects again and again."""

    async def story(bench: Bench) -> None:
        registry, hello = bench.fleet.registry, make_hello()
        workload = Workload(workload_id="w-1", worker_id=hello.worker_id)
        stored_ns = time.time_ns()
        known = registry.welcome(hello, 1, SessionId("s-1"), time.monotonic(), stored_ns)
        assert not bench.fleet.reader.view(workload).HasField("report_time")
        registry.applied(known)
        for number in (2, 3):
            registry.seen(known, time.monotonic(), time.time_ns())
            registry.disconnect(known, known.session_id or SessionId(""), left=False)
            assert bench.fleet.reader.view(workload).report_time.ToNanoseconds() == stored_ns
            now_ns = time.time_ns()
            known = registry.welcome(hello, number, SessionId(f"s-{number}"), time.monotonic(), now_ns)

    on_bench(tmp_path, story)


def test_a_worker_whose_reports_can_not_be_stored_has_that_reason(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        hello = make_hello()
        known = bench.fleet.registry.welcome(hello, 1, SessionId("s-1"), time.monotonic(), time.time_ns())
        bench.store.health.is_serving = False
        assert bench.fleet.reader.worker(known).refusal == ""
        bench.fleet.registry.disconnect(known, SessionId("s-1"), left=False)
        told = "the coordinator's store can't be written: look at its disk"
        assert bench.fleet.reader.worker(known).refusal == told
        bench.store.health.is_serving = True
        assert bench.fleet.reader.worker(known).refusal == ""

    on_bench(tmp_path, story)


def test_the_end_of_a_block_is_published(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        registry, news, hub = bench.fleet.registry, bench.fleet.worker_news, bench.fleet.reader.fleet_hub
        known = registry.welcome(make_hello(), 1, SessionId("s-1"), time.monotonic(), time.time_ns())
        known.refusal = "worker/alpha is blocked"
        registry.disconnect(known, SessionId("s-1"), left=False)
        news.publish(known)
        with hub.subscribe() as subscription:
            news.publish_silent_workers()
            known.refusal = ""
            for _ in range(3):
                news.publish_silent_workers()
            told = [change.message.worker for change in subscription.until(hub.revision)]
        assert [(one.name, one.refusal) for one in told] == [("alpha", "")]

    on_bench(tmp_path, story)
