"""What has happened is kept for a while, newest first."""

import asyncio
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, event_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import ListEventsRequest
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    StopWorkloadRequest,
    WatchWorkloadsRequest,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import event_log as events_module
from leasehold_coordinator.fleet import refusals
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import OldRows, command_row, event_row
from leasehold_coordinator.storage.store import Store

from tests.channels import open_worker_channel
from tests.coordinator.bench import FULL, Bench, on_bench
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.pages import all_events
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello


def listed(coordinator: CoordinatorProcess, **fields: str) -> list[Event]:
    stub = EventServiceStub(coordinator.channel)
    return list(stub.ListEvents(ListEventsRequest(**fields)).events)  # type: ignore[arg-type]  # by name


def run(coordinator: CoordinatorProcess, worker: ScriptedWorker, status: WorkloadStatus) -> Workload:
    """Runs a workload, which the worker reports in a state."""
    request = CreateWorkloadRequest(name="one", spec=WorkloadSpec(arguments=["program"]))
    workload = coordinator.workloads.CreateWorkload(request).workload
    worker.succeed("run", Workload(workload_id=workload.workload_id, name="one", status=status))
    return workload


def test_the_life_of_a_workload_is_told_newest_first(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1)
    workload = run(coordinator, worker, status)
    coordinator.connect(make_hello("beta"))
    told = [(event.kind, event.message) for event in listed(coordinator, workload="one")]
    assert told == [
        (event_pb2.EVENT_KIND_COMMAND_ENDED, "run of one is SUCCEEDED"),
        (event_pb2.EVENT_KIND_WORKLOAD_CHANGED, "workload one is RUNNING"),
        (event_pb2.EVENT_KIND_COMMAND_CREATED, "run of one is DISPATCHED"),
    ]
    coordinator.workloads.StopWorkload(StopWorkloadRequest(workload="one"))
    worker.command("stop")
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_EXITED, generation=2)
    tell(worker, Workload(workload_id=workload.workload_id, name="one", status=status))
    worker.succeed("stop")
    stopped = [event.message for event in listed(coordinator, workload=workload.workload_id)]
    assert stopped[:3] == ["stop of one is SUCCEEDED", "workload one is EXITED", "stop of one is DISPATCHED"]
    worker.close()
    deadline = time.monotonic() + 20
    while event_pb2.EVENT_KIND_WORKER_STALE not in {event.kind for event in listed(coordinator)}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kinds = [event.kind for event in listed(coordinator, worker="alpha")]
    assert kinds[0] == event_pb2.EVENT_KIND_WORKER_STALE
    assert kinds[-1] == event_pb2.EVENT_KIND_WORKER_CONNECTED
    before = listed(coordinator)
    coordinator.restart()
    assert listed(coordinator)[-len(before) :] == before
    while "worker alpha is UNCONFIRMED" not in (log := (coordinator.folder / "coordinator.log").read_text()):
        assert time.monotonic() < deadline + 20
        time.sleep(0.02)
    assert "WORKER_STATE_" not in log


def tell(worker: ScriptedWorker, workload: Workload) -> None:
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=workload)))


def test_that_a_workload_runs_although_its_hooks_failed_is_told(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    error = errors_pb2.Error(reason=errors_pb2.ERROR_REASON_HOOK_FAILED)
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1, error=error)
    run(coordinator, worker, status)
    watch = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(workload="one"), timeout=20)
    while next(watch).workload.status.state != status.state:
        pass
    told = "workload one is RUNNING, but some of its hooks failed (HOOK_FAILED)"
    assert told in [one.message for one in listed(coordinator, workload="one")]


def test_that_a_workload_became_ready_is_told(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1)
    workload = run(coordinator, worker, status)
    watch = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(workload="one"), timeout=20)
    assert not next(watch).workload.status.HasField("ready_time")
    assert next(watch).bookmark.snapshot_end
    status.generation = 2
    status.ready_time.FromSeconds(1_700_000_000)
    tell(worker, Workload(workload_id="w-other", name="other", status=status))
    tell(worker, Workload(workload_id=workload.workload_id, name="one", status=status))
    told = next(watch)
    assert (told.workload.name, told.workload.status.ready_time.seconds) == ("one", 1_700_000_000)
    assert listed(coordinator, workload="one")[0].message == "workload one is RUNNING and ready"
    again = WatchWorkloadsRequest(workload="one", resume_token=told.resume_token)
    resumed = coordinator.workloads.WatchWorkloads(again, timeout=20)
    status.generation = 3
    status.state = workload_pb2.WORKLOAD_STATE_EXITED
    tell(worker, Workload(workload_id="w-other", name="other", status=status))
    tell(worker, Workload(workload_id=workload.workload_id, name="one", status=status))
    assert next(resumed).workload.name == "one"
    ended = next(coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(workload="one"), timeout=20))
    assert ended.workload.status.state == workload_pb2.WORKLOAD_STATE_EXITED


def test_a_worker_that_is_refused_is_told(coordinator: CoordinatorProcess) -> None:
    hello = make_hello()
    hello.protocol_version.major = 9
    coordinator.connect(hello).wait_end()
    newest = listed(coordinator)[0]
    assert newest.kind == event_pb2.EVENT_KIND_WORKER_REFUSED
    assert "protocol 9.0" in newest.message


def test_a_flood_of_refusals_is_told_by_its_number(coordinator: CoordinatorProcess) -> None:
    hello = make_hello()
    hello.protocol_version.major = 9
    with open_worker_channel(coordinator.worker_address) as channel:
        stub = SessionServiceStub(channel)
        for _ in range(2 * refusals.TOLD_LIMIT):
            (refusal,) = stub.Connect(iter([ConnectRequest(hello=hello)]), timeout=20)
            assert refusal.HasField("goodbye")
    told = [one for one in listed(coordinator) if one.kind == event_pb2.EVENT_KIND_WORKER_REFUSED]
    assert len(told) == refusals.TOLD_LIMIT
    assert coordinator.log().count("refused a worker") == refusals.TOLD_LIMIT


def test_each_host_has_a_share_of_what_is_told_of_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + now)
    monkeypatch.setattr(refusals, "HOST_LIMIT", 2)
    limit = refusals.TOLD_LIMIT

    async def scenario(bench: Bench) -> None:
        nonlocal now
        told = bench.fleet.refusals
        for host in ("10.0.0.1", "10.0.0.2"):
            answers = [told.may_tell(f"ipv4:{host}:{port}") for port in range(limit + 3)]
            assert answers == [True] * limit + [False] * 3
        others = [told.may_tell(f"ipv6:[::{number:x}]:1") for number in range(3, limit + 5)]
        assert others == [True] * limit + [False] * 2, "the table of hosts is bounded"
        told.tick()
        assert not caplog.records
        now += refusals.PERIOD_S
        told.tick()
        await bench.fleet.events.flush()
        found = await all_events(bench.store)
        assert {event.message.split(" were ")[0] for event in found} == {
            "3 more workers or sessions of ipv4:10.0.0.1",
            "3 more workers or sessions of ipv4:10.0.0.2",
            "2 more workers or sessions of other hosts",
        }
        assert told.may_tell("ipv4:10.0.0.1:5")

    on_bench(tmp_path, scenario)


def messages(path: Path) -> list[str]:
    async def listed() -> list[str]:
        store = Store.open(str(path))
        found = await all_events(store)
        store.close()
        return [event.message for event in reversed(found)]

    return asyncio.run(listed())


def refusal(message: str) -> FleetError:
    return FleetError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, message)


def test_no_text_of_a_worker_makes_an_event_large(tmp_path: Path) -> None:
    long = FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, "x" * 250_000)

    async def scenario(bench: Bench) -> None:
        events = bench.fleet.events
        error = errors_pb2.Error(message=long.message)
        command = Command(command_id="c-1", state=command_pb2.COMMAND_STATE_FAILED, error=error)
        ended = events.of_command(command, workload_name="one", worker_name="alpha", slots={})
        events.refused(long, "worker-alpha", "alpha")
        events.protocol_error(long, "worker-alpha", "alpha")
        for event in [ended, *events._waiting]:
            assert event is not None
            assert len(event.message) == events_module.MESSAGE_LIMIT
            assert event.message.endswith("x…")

    on_bench(tmp_path, scenario)


def test_events_are_stored_once_by_whoever_comes_first_and_none_is_lost(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        events = bench.fleet.events
        events.refused(refusal("first"))
        with pytest.MonkeyPatch.context() as monkeypatch:
            gate = bench.hold_writes(monkeypatch, schema.events)
            flushing = asyncio.create_task(events.flush())
            await gate.reached.wait()
            events.refused(refusal("second"))
            others = [asyncio.create_task(events.flush()) for _ in range(2)]
            gate.opened.set()
            await asyncio.gather(flushing, *others)

    on_bench(tmp_path, scenario)
    assert messages(tmp_path / "store.sqlite3") == ["first", "second"]


def test_events_that_cannot_be_stored_wait_and_the_oldest_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "WAITING_LIMIT", 2)

    async def scenario(bench: Bench) -> None:
        events = bench.fleet.events
        for message in ("first", "second"):
            events.refused(refusal(message))
        with pytest.MonkeyPatch.context() as patched:
            gate = bench.hold_writes(patched, schema.events, FULL)
            flushing = asyncio.create_task(events.flush())
            await gate.reached.wait()
            events.refused(refusal("third"))
            gate.opened.set()
            with pytest.raises(FleetError):
                await flushing
        await events.flush()

    on_bench(tmp_path, scenario)
    assert messages(tmp_path / "store.sqlite3") == ["second", "third"]


async def fill(store: Store, numbers: Iterable[int]) -> None:
    for number in numbers:
        for state in (command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_PENDING):
            command = command_pb2.Command(command_id=f"c{number}-{state}", state=state)
            command.create_time.FromNanoseconds(number + 1)
            event = Event(event_id=f"{schema.event_id_at(number + 1)}-{state:04d}")
            event.time.FromNanoseconds(number + 1)
            await store.write(command_row(StoredCommand(command)), event_row(event))


def test_what_is_old_and_has_ended_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, served_s = tmp_path / "store.sqlite3", [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: served_s[0])

    async def scenario() -> None:
        store = Store.open(str(path))
        await fill(store, range(2))
        served_s[0] += 100
        await fill(store, range(2, 4))
        await store.write(OldRows(schema.commands, 50), OldRows(schema.events, 50))
        store.close()

    asyncio.run(scenario())
    with sqlite3.connect(path) as connection:
        commands = {row[0] for row in connection.execute("SELECT command_id FROM commands WHERE ended")}
        opened = connection.execute("SELECT count(*) FROM commands WHERE NOT ended").fetchone()[0]
        events = connection.execute("SELECT count(*) FROM events").fetchone()[0]
    connection.close()
    assert commands == {"c2-5", "c3-5"}
    assert opened == 4
    assert events == 4
