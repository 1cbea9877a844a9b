"""Lists, page by page, and what the coordinator says of itself and to its workers."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import cast

import grpc
import pytest
from leasehold.v1 import lease_pb2, worker_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.event_service_pb2 import ListEventsRequest
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.fleet_service_pb2 import (
    DeleteWorkerRequest,
    GetGpuRequest,
    ListGpusRequest,
    ListWorkersRequest,
    WatchFleetRequest,
)
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest, ListWorkloadsRequest
from leasehold.worker.v1.session_pb2 import ConnectRequest, Goodbye, Heartbeat, WorkerLoad
from leasehold_coordinator.api.fleet_service import FleetService
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.core.known_worker import KnownWorker, SessionId
from leasehold_coordinator.core.worker_registry import LOADS_PER_S
from leasehold_coordinator.fleet.session import Session

from tests.coordinator.api.test_command_service import refusal, start
from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

CPU = WorkloadSpec(arguments=["program"])


def test_lists_come_page_by_page_and_whole(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    coordinator.connect(make_hello("beta", gpu_count=3)).welcome()
    for number in range(5):
        spec = CreateWorkloadRequest(name=f"n{number}", spec=CPU, worker="alpha")
        coordinator.workloads.CreateWorkload(spec)
    names, gpus, commands, workers = [], [], [], []
    token = ""
    while True:
        page = coordinator.workloads.ListWorkloads(ListWorkloadsRequest(page_size=2, page_token=token))
        names.append([workload.name for workload in page.workloads])
        if not (token := page.next_page_token):
            break
    assert names == [["n4", "n3"], ["n2", "n1"], ["n0"]]
    while True:
        listed = coordinator.commands.ListCommands(ListCommandsRequest(page_size=5, page_token=token))
        commands += [command.operation.run.name for command in listed.commands]
        if not (token := listed.next_page_token):
            break
    assert commands == ["n4", "n3", "n2", "n1", "n0"]
    while True:
        gpu_page = coordinator.fleet.ListGpus(ListGpusRequest(page_size=2, page_token=token))
        gpus += [gpu.gpu.uuid for gpu in gpu_page.gpus]
        if not (token := gpu_page.next_page_token):
            break
    assert gpus == ["GPU-alpha-0", "GPU-alpha-1", "GPU-beta-0", "GPU-beta-1", "GPU-beta-2"]
    while True:
        fleet_page = coordinator.fleet.ListWorkers(ListWorkersRequest(page_size=1, page_token=token))
        workers += [known.name for known in fleet_page.workers]
        if not (token := fleet_page.next_page_token):
            break
    assert workers == ["alpha", "beta"]


def test_a_page_of_gpus_makes_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs of a fleet take 5 ms for each thousand of them, on the event loop."""

    async def scenario(bench: Bench) -> None:
        fleet = bench.fleet.reader
        made: list[str] = []
        requests = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds)
        service = FleetService(fleet, requests, RecordChanges(bench.fleet, requests.decisions))
        for name in "abcdef":
            fleet.registry.welcome(make_hello(name, gpu_count=3), 1, SessionId("s-1"), 0, time.time_ns())
        make = fleet.gpus

        def note(known: KnownWorker) -> list[FleetGpu]:
            made.append(known.hello.name)
            return make(known)

        monkeypatch.setattr(fleet, "gpus", note)
        context = cast("Context", None)
        token = (await service.ListGpus(ListGpusRequest(page_size=5), context)).next_page_token
        assert made == ["a", "b"]
        made.clear()
        page = await service.ListGpus(ListGpusRequest(page_size=2, page_token=token), context)
        assert [gpu.gpu.uuid for gpu in page.gpus] == ["GPU-b-2", "GPU-c-0"]
        assert made == ["b", "c"]
        found = await service.GetGpu(GetGpuRequest(uuid="GPU-e-1"), context)
        assert (found.gpu.worker_name, made) == ("e", ["b", "c", "e"])

    on_bench(tmp_path, scenario)


def test_lists_are_filtered_and_sorted_over_the_wire(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    coordinator.connect(make_hello("beta", gpu_count=3, labels={"rack": "r1"})).welcome()
    for name in ("one", "two", "three"):
        spec = CreateWorkloadRequest(name=name, spec=CPU, worker="alpha")
        coordinator.workloads.CreateWorkload(spec)
    workers = coordinator.fleet.ListWorkers(ListWorkersRequest(filter="labels.rack = r1")).workers
    assert [known.name for known in workers] == ["beta"]
    gpus = coordinator.fleet.ListGpus(
        ListGpusRequest(filter="state = FREE AND slot > 0", order_by="slot desc")
    )
    assert [gpu.gpu.uuid for gpu in gpus.gpus] == ["GPU-beta-2", "GPU-alpha-1", "GPU-beta-1"]
    by_name = ListWorkloadsRequest(filter="worker = alpha AND NOT name = two", order_by="name", page_size=1)
    first = coordinator.workloads.ListWorkloads(by_name)
    assert [one.name for one in first.workloads] == ["one"]
    by_name.page_token = first.next_page_token
    assert [one.name for one in coordinator.workloads.ListWorkloads(by_name).workloads] == ["three"]
    listed = coordinator.commands.ListCommands(ListCommandsRequest(filter="workload = two"))
    assert [command.operation.run.name for command in listed.commands] == ["two"]
    events = EventServiceStub(coordinator.channel)
    created = ListEventsRequest(filter="kind = COMMAND_CREATED AND workload = three")
    assert len(events.ListEvents(created).events) == 1

    token = first.next_page_token
    refusals: list[tuple[Callable[[], object], str]] = [
        (
            lambda: coordinator.workloads.ListWorkloads(ListWorkloadsRequest(page_token=token)),
            "INVALID_TOKEN",
        ),
        (lambda: coordinator.commands.ListCommands(ListCommandsRequest(page_token=token)), "INVALID_TOKEN"),
        (lambda: coordinator.fleet.ListGpus(ListGpusRequest(filter="gpu = 1")), "INVALID_ARGUMENT"),
        (lambda: events.ListEvents(ListEventsRequest(order_by="kind")), "INVALID_ARGUMENT"),
        (lambda: coordinator.fleet.ListWorkers(ListWorkersRequest(page_size=-1)), "INVALID_ARGUMENT"),
    ]
    for call, reason in refusals:
        assert refusal(call) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert len(coordinator.fleet.ListWorkers(ListWorkersRequest(page_size=5_000)).workers) == 2


def test_lists_can_be_of_one_worker_or_workload(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    coordinator.connect(make_hello("beta", gpu_count=1)).welcome()
    start(coordinator, worker, "one", CPU)
    of_beta = coordinator.fleet.ListGpus(ListGpusRequest(worker="beta")).gpus
    assert [gpu.gpu.uuid for gpu in of_beta] == ["GPU-beta-0"]
    assert not coordinator.workloads.ListWorkloads(ListWorkloadsRequest(worker="beta")).workloads
    assert len(coordinator.workloads.ListWorkloads(ListWorkloadsRequest(worker="alpha")).workloads) == 1
    assert len(coordinator.commands.ListCommands(ListCommandsRequest(workload="one")).commands) == 1


def test_an_older_load_changes_nothing_and_heartbeats_name_the_newest(
    coordinator: CoordinatorProcess,
) -> None:
    worker = coordinator.connect()
    worker.welcome()
    watching = coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20)
    while not next(watching).bookmark.snapshot_end:
        pass
    for sequence, state in ((5, lease_pb2.SLOT_STATE_LEASED), (4, lease_pb2.SLOT_STATE_FREE)):
        pool = [GpuLease(gpu_uuid="GPU-alpha-0", state=state)]
        worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=sequence, gpu_leases=pool)))
    pool = [GpuLease(gpu_uuid="GPU-alpha-0", state=lease_pb2.SLOT_STATE_CORDONED)]
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=6, gpu_leases=pool)))
    states: list[int] = []
    while lease_pb2.SLOT_STATE_CORDONED not in states:
        change = next(watching)
        if change.gpu.gpu.uuid == "GPU-alpha-0":
            states.append(change.gpu.lease.state)
    assert states == [lease_pb2.SLOT_STATE_LEASED, lease_pb2.SLOT_STATE_CORDONED]
    watching.cancel()


def test_the_coordinator_shows_that_it_lives(coordinator: CoordinatorProcess) -> None:
    coordinator.load_interval_s = 0.05
    coordinator.restart()
    worker = coordinator.connect()
    assert worker.welcome().load_interval.nanos == 50_000_000
    for sequence in (7, 8, 9):
        worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=sequence)))
    beat = worker.wait(lambda frame: frame.heartbeat.applied_load_sequence == 9).heartbeat
    assert not beat.HasField("load_interval"), "the fleet is as large as it was"


@pytest.mark.long
def test_the_load_interval_grows_and_shrinks_with_the_fleet(coordinator: CoordinatorProcess) -> None:
    coordinator.load_interval_s = 0.05
    coordinator.restart()
    worker = coordinator.connect()
    worker.welcome()  # before the others come, whose number changes the interval
    others = [coordinator.connect(make_hello(f"other-{number}")) for number in range(23)]
    intervals_s = [other.welcome().load_interval.ToNanoseconds() / 1e9 for other in others]
    assert max(intervals_s) == pytest.approx(24 / LOADS_PER_S)
    for _ in range(3):
        worker.report()
    beat = worker.wait(lambda frame: frame.heartbeat.applied_load_sequence == 3).heartbeat
    assert beat.load_interval.ToNanoseconds() / 1e9 == pytest.approx(24 / LOADS_PER_S)
    assert beat.silence_limit.ToNanoseconds() == 12 * beat.load_interval.ToNanoseconds()
    for other in others:
        other.up.put(ConnectRequest(goodbye=Goodbye()))
        other.wait_ended()
        coordinator.fleet.DeleteWorker(DeleteWorkerRequest(worker=other.first.hello.worker_id))
    for _ in range(3):
        worker.report()
    beat = worker.wait(lambda frame: frame.heartbeat.applied_load_sequence == 6).heartbeat
    assert beat.load_interval.ToNanoseconds() == 50_000_000


@pytest.mark.long
def test_ten_thousand_workers_send_a_load_every_fifty_seconds(tmp_path: Path) -> None:
    """By the rule max(5 s, n/200 s), and they count as STALE and LOST only after many of these intervals."""

    async def scenario(bench: Bench) -> None:
        fleet, service = bench.fleet, bench.service
        session = Session(make_hello("early"))
        await service._welcome(session)
        early = session.known
        assert early is not None
        (welcome,) = session.frames
        assert welcome.welcome.load_interval.ToTimedelta() == timedelta(seconds=5)

        def add(count: int) -> None:
            for number in range(len(list(fleet.registry)), count):
                fleet.registry.add_stored(make_hello(f"w{number}", gpu_count=0), 1)

        def told(loads: int) -> Heartbeat:
            for _ in range(loads):
                service._take_load(session, WorkerLoad(sequence=early.load_sequence + 1))
            return session.frames.pop().heartbeat

        add(1_000)
        assert not told(3).HasField("load_interval"), "1,000 workers still send 200 loads in a second"
        add(10_000)
        beat = told(3)
        assert beat.load_interval.ToTimedelta() == timedelta(seconds=50)
        assert beat.silence_limit.ToTimedelta() == timedelta(seconds=600)
        assert not told(3).HasField("load_interval"), "it was told"

        for known, seen in ((early, early.last_seen), (await welcomed_late(bench), time.monotonic())):
            states = [
                fleet.registry.state(known, seen + silent_s) for silent_s in (124.0, 126.0, 199.0, 201.0)
            ]
            assert states == [
                worker_pb2.WORKER_STATE_CONNECTED,
                worker_pb2.WORKER_STATE_STALE,
                worker_pb2.WORKER_STATE_STALE,
                worker_pb2.WORKER_STATE_LOST,
            ]

    async def welcomed_late(bench: Bench) -> KnownWorker:
        """A worker that the fleet has known as one of the 10,000, and that connects now."""
        session = Session(make_hello("w9999", gpu_count=0))
        await bench.service._welcome(session)
        assert session.known is not None
        assert session.frames[0].welcome.load_interval.ToTimedelta() == timedelta(seconds=50)
        return session.known

    on_bench(tmp_path, scenario)


def test_a_message_that_is_too_large_is_refused_and_nobody_suffers(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    spec = WorkloadSpec(arguments=["x" * 300_000])
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=spec))
    assert not coordinator.workloads.ListWorkloads(ListWorkloadsRequest()).workloads
    assert not worker.ended
