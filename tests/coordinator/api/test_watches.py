"""Watches: a snapshot, then changes and deletions, with tokens to resume from, and never an older state."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from leasehold.v1 import command_pb2, errors_pb2, lease_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import (
    ListCommandsRequest,
    WatchCommandsRequest,
    WatchCommandsResponse,
)
from leasehold.v1.event_pb2 import EVENT_KIND_CORDON, Event
from leasehold.v1.event_service_pb2 import ListEventsRequest, WatchEventsRequest, WatchEventsResponse
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.fleet_service_pb2 import (
    DeleteWorkerRequest,
    GetGpuRequest,
    ListGpusRequest,
    WatchFleetRequest,
    WatchFleetResponse,
)
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.operation_pb2 import Move
from leasehold.v1.worker_pb2 import WORKER_STATE_DISCONNECTED
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec
from leasehold.v1.workload_service_pb2 import (
    DeleteWorkloadRequest,
    GetWorkloadRequest,
    UpdateWorkloadRequest,
    WatchWorkloadsRequest,
    WatchWorkloadsResponse,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, Goodbye, WorkerLoad, WorkloadEvent
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.api import event_service
from leasehold_coordinator.api.command_service import CommandService
from leasehold_coordinator.api.event_service import EventService
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.watch_stream import watch
from leasehold_coordinator.api.workload_service import WorkloadService
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.plans import Plans
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import change_hub
from leasehold_coordinator.fleet.callers import note_caller
from leasehold_coordinator.fleet.change_hub import Hub
from leasehold_coordinator.fleet.retention import prune
from leasehold_coordinator.lists.filters import Filter, matches
from leasehold_coordinator.storage import schema

from tests.channels import open_channel
from tests.coordinator.api.test_command_service import ended, refusal, reported, start, suspend
from tests.coordinator.bench import FULL, Bench, on_bench, workload
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until
from tests.coordinator.stories.test_newcomers import alpha_state

RUNNING, SUSPENDED, EXITED = (
    workload_pb2.WORKLOAD_STATE_RUNNING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_EXITED,
)
CPU = WorkloadSpec(arguments=["program"])

Response = TypeVar(
    "Response", WatchFleetResponse, WatchWorkloadsResponse, WatchCommandsResponse, WatchWorkloadsResponse
)


def snapshot(responses: Iterable[Response]) -> list[Response]:
    """The responses up to the end of the snapshot. Only the last one has a token."""
    found = []
    for response in responses:
        found.append(response)
        assert bool(response.resume_token) == response.bookmark.snapshot_end
        if response.bookmark.snapshot_end:
            break
    return found


def leave(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    """A worker says goodbye."""
    worker.up.put(ConnectRequest(goodbye=Goodbye()))
    worker.wait_end()
    until(lambda: alpha_state(coordinator) == WORKER_STATE_DISCONNECTED)


def test_a_gpu_that_is_gone_is_a_deletion_also_for_a_watch_that_is_resumed(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    watching = coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20)
    token = snapshot(watching)[-1].resume_token
    worker.up.put(ConnectRequest(hello=make_hello(gpu_count=1)))
    for again in (watching, coordinator.fleet.WatchFleet(WatchFleetRequest(resume_token=token), timeout=20)):
        assert next(again).deleted_gpu_uuid == "GPU-alpha-1"
        assert next(again).worker.gpu_count == 1
        assert next(again).gpu.gpu.uuid == "GPU-alpha-0"
        again.cancel()
    assert len(coordinator.fleet.ListGpus(ListGpusRequest()).gpus) == 1


def deletions(responses: Iterable[WatchFleetResponse], last: str) -> list[str]:
    """What is deleted, up to the last one."""
    gone: list[str] = []
    for response in responses:
        gone += [one for one in (response.deleted_gpu_uuid, response.deleted_worker_id) if one]
        if last in gone:
            break
    return gone


def test_a_deleted_worker_goes_with_its_gpus(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    watching = coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20)
    token = snapshot(watching)[-1].resume_token
    leave(coordinator, worker)
    coordinator.fleet.DeleteWorker(DeleteWorkerRequest(worker="alpha"))
    for again in (watching, coordinator.fleet.WatchFleet(WatchFleetRequest(resume_token=token), timeout=20)):
        assert deletions(again, "worker-alpha") == ["GPU-alpha-0", "GPU-alpha-1", "worker-alpha"]
        again.cancel()
    left = snapshot(coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20))
    assert [response.WhichOneof("change") for response in left] == ["bookmark"]


def test_a_gpu_that_another_worker_has_now_is_not_deleted(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    leave(coordinator, worker)
    watching = coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20)
    snapshot(watching)
    taker = make_hello("beta", gpu_count=1)
    taker.gpus[0].uuid = taker.gpu_leases[0].gpu_uuid = "GPU-alpha-0"
    coordinator.connect(taker).welcome()
    coordinator.fleet.DeleteWorker(DeleteWorkerRequest(worker="alpha"))
    assert deletions(watching, "worker-alpha") == ["GPU-alpha-1", "worker-alpha"]
    watching.cancel()
    left = snapshot(coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20))
    assert [response.gpu.worker_name for response in left if response.HasField("gpu")] == ["beta"]


def test_a_slow_reader_of_the_fleet_never_gets_an_older_state_after_a_newer_one(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    """The snapshot is larger than what gRPC keeps for a reader, so its end is read late."""
    labels = {f"label-{number}": "x" * 200 for number in range(120)}
    for number in range(20):
        coordinator.connect(make_hello(f"a{number:02}", gpu_count=0, labels=labels)).welcome()
    late = coordinator.connect(make_hello("zulu", gpu_count=1))
    late.welcome()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
    channel = open_channel(coordinator.address, options=options)
    watching = FleetServiceStub(channel).WatchFleet(WatchFleetRequest(), timeout=60)
    next(watching)
    for sequence in range(1, 21):
        lease = GpuLease(
            gpu_uuid="GPU-zulu-0", state=lease_pb2.SLOT_STATE_LEASED, workload_id=f"w-{sequence:02}"
        )
        late.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=sequence, gpu_leases=[lease])))
    gpu = GetGpuRequest(uuid="GPU-zulu-0")
    until(lambda: coordinator.fleet.GetGpu(gpu).gpu.lease.workload_id == "w-20")
    holders: list[str] = []
    for response in watching:
        if response.gpu.gpu.uuid == "GPU-zulu-0":
            holders.append(response.gpu.lease.workload_id)
        if response.bookmark.snapshot_end:
            break
    assert holders == sorted(holders)
    assert holders[-1] == "w-20"
    resumed = coordinator.fleet.WatchFleet(WatchFleetRequest(resume_token=response.resume_token), timeout=20)
    late.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=21)))
    change = next(one for one in resumed if one.worker.name == "zulu" or one.gpu.gpu.uuid == "GPU-zulu-0")
    assert change.worker.name == "zulu", "no state of the GPU from before the token comes again"
    watching.cancel()
    resumed.cancel()
    channel.close()


async def read(responses: AsyncGenerator[Response], count: int) -> list[Response]:
    async with asyncio.timeout(20):
        return [await anext(responses) for _ in range(count)]


def test_changes_that_come_while_a_snapshot_is_read_are_sent_before_its_end() -> None:
    async def scenario() -> None:
        hub: Hub[WatchWorkloadsResponse] = Hub()
        state = {"a": 1, "b": 1, "c": 1}

        def shown(key: str) -> WatchWorkloadsResponse:
            found = WatchWorkloadsResponse(workload=Workload(workload_id=key))
            found.workload.status.generation = state[key]
            return found

        def change(key: str) -> None:
            state[key] += 1
            hub.publish(key, shown(key))

        entries = ([(key, shown(key))] for key in ("a", "b"))
        responses = watch(hub, WatchWorkloadsResponse, "", entries)
        [first] = await read(responses, 1)
        for key in ("b", "a", "c", "b"):
            change(key)
        hub.publish("d", WatchWorkloadsResponse(deleted_workload_id="d"))
        rest = await read(responses, 5)
        told = [(one.workload.workload_id, one.workload.status.generation) for one in (first, *rest)]
        assert told == [("a", 1), ("b", 3), ("a", 2), ("c", 2), ("", 0), ("", 0)]
        assert rest[-2].deleted_workload_id == "d"
        assert rest[-1].bookmark.snapshot_end
        assert list(hub.since(rest[-1].resume_token)) == []
        await responses.aclose()

    asyncio.run(scenario())


def test_a_watcher_that_falls_behind_during_its_snapshot_gets_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resume from the end of the snapshot would skip the changes that were dropped."""
    monkeypatch.setattr(change_hub, "BACKLOG_LIMIT", 2)

    async def scenario() -> None:
        hub: Hub[WatchWorkloadsResponse] = Hub()
        entries = ([(key, WatchWorkloadsResponse(workload=Workload(workload_id=key)))] for key in ("a", "b"))
        responses = watch(hub, WatchWorkloadsResponse, "", entries)
        told = await read(responses, 1)
        for _ in range(3):
            hub.publish("a", WatchWorkloadsResponse(deleted_workload_id="a"))
        told += await read(responses, 1)
        with pytest.raises(FleetError) as error:
            told += await read(responses, 3)
        assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN
        assert [one.resume_token for one in told] == ["", ""]

    asyncio.run(scenario())


def test_a_snapshot_without_matches_leaves_the_loop_to_others() -> None:
    async def scenario() -> None:
        hub: Hub[WatchWorkloadsResponse] = Hub()
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        entries = (
            [(str(number), WatchWorkloadsResponse(workload=Workload(workload_id=str(number))))]
            for number in range(100)
        )
        responses = watch(hub, WatchWorkloadsResponse, "", entries, shown=lambda _: WatchWorkloadsResponse())
        ticking = asyncio.create_task(tick())
        [end] = await read(responses, 1)
        ticking.cancel()
        assert end.bookmark.snapshot_end
        assert turns >= 100, "one for each entry"
        await responses.aclose()

    asyncio.run(scenario())


def workload_service(bench: Bench) -> WorkloadService:
    requests = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds)
    reader = bench.fleet.reader
    return WorkloadService(
        reader, requests, RecordChanges(bench.fleet, requests.decisions), Plans(reader, bench.dispatcher)
    )


def watch_workloads(bench: Bench, wanted: str = "") -> AsyncGenerator[WatchWorkloadsResponse]:
    service = workload_service(bench)
    watching = service.WatchWorkloads(WatchWorkloadsRequest(workload=wanted), cast("Context", None))
    return cast("AsyncGenerator[WatchWorkloadsResponse]", watching)


def test_a_workload_is_shown_as_it_is_on_disk_and_never_goes_back(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fleet.save_workload(workload(RUNNING, 1))
        with pytest.MonkeyPatch.context() as monkeypatch:
            writes = bench.hold_writes(monkeypatch, schema.workloads)
            saving = [
                asyncio.create_task(bench.fleet.apply_workload(workload(state, generation), bench.session))
                for state, generation in ((SUSPENDED, 2), (RUNNING, 3), (EXITED, 4))
            ]
            await writes.reached.wait()
            responses = watch_workloads(bench)
            told = await read(responses, 2)
            writes.opened.set()
            await asyncio.gather(*saving)
        told += await read(responses, 3)
        assert [one.workload.status.generation for one in told] == [1, 0, 2, 3, 4]
        await responses.aclose()
        responses = watch_workloads(bench)
        assert (await read(responses, 1))[0].bookmark.snapshot_end
        await responses.aclose()

    on_bench(tmp_path, scenario)


def test_a_workload_that_changes_while_the_store_is_read_is_shown_as_it_is_now(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fleet.save_workload(workload(EXITED, 2))
        find_now = bench.store.find_workload
        later = [workload(EXITED, 3)]

        async def find(id_or_name: str, owner: str) -> Workload | None:
            found = await find_now(id_or_name, owner)
            if later:
                await bench.fleet.save_workload(later.pop())
            return found

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(bench.store, "find_workload", find)
            responses = watch_workloads(bench, "w-1")
            assert [one.workload.status.generation for one in await read(responses, 2)] == [3, 0]
            await responses.aclose()

    on_bench(tmp_path, scenario)


def test_a_workload_that_is_being_stored_for_the_first_time_is_not_shown(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            writes = bench.hold_writes(monkeypatch, schema.workloads)
            saving = asyncio.create_task(bench.fleet.save_workload(workload(RUNNING, 1)))
            await writes.reached.wait()
            responses = watch_workloads(bench)
            assert (await read(responses, 1))[0].bookmark.snapshot_end
            writes.opened.set()
            await saving
        assert (await read(responses, 1))[0].workload.workload_id == "w-1"
        await responses.aclose()

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("wanted", ["w-1", "one"])
def test_a_named_workload_is_shown_as_it_is_on_disk(tmp_path: Path, wanted: str) -> None:
    async def shown(bench: Bench) -> int:
        """The generation that a get and a watch show."""
        request = GetWorkloadRequest(workload=wanted)
        got = await workload_service(bench).GetWorkload(request, cast("Context", None))
        responses = watch_workloads(bench, wanted)
        [told] = await read(responses, 1)
        await responses.aclose()
        assert told.workload == got.workload
        return got.workload.status.generation

    async def scenario(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            writes = bench.hold_writes(monkeypatch, schema.workloads, FULL)
            saving = asyncio.create_task(bench.fleet.save_workload(workload(RUNNING, 1)))
            await writes.reached.wait()
            waiting = asyncio.create_task(shown(bench))
            await asyncio.sleep(0)
            assert not waiting.done(), "it may be stored in a moment"
            writes.opened.set()
            await asyncio.wait({saving, waiting})
        assert isinstance(saving.exception(), FleetError)
        with pytest.raises(FleetError, match="no workload has the id or name"):
            await waiting
        for newer in (workload(RUNNING, 1), workload(SUSPENDED, 2), workload(EXITED, 3)):
            with pytest.MonkeyPatch.context() as monkeypatch:
                writes = bench.hold_writes(monkeypatch, schema.workloads)
                saving = asyncio.create_task(bench.fleet.save_workload(newer))
                await writes.reached.wait()
                if newer.status.generation > 1:
                    assert await shown(bench) == newer.status.generation - 1
                writes.opened.set()
                await saving
            assert await shown(bench) == newer.status.generation

    on_bench(tmp_path, scenario)


def exit_workload(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, running: Workload, generation: int = 2
) -> None:
    """The program of a workload ends."""
    over = reported(running, EXITED, generation)
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=over)))
    watching = coordinator.workloads.WatchWorkloads(
        WatchWorkloadsRequest(workload=running.workload_id), timeout=20
    )
    while next(watching).workload.status.state != EXITED:
        pass
    watching.cancel()


def test_commands_are_watched_and_their_deletion_too(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    one, other = (start(coordinator, worker, name, CPU) for name in ("one", "other"))
    pending = suspend(coordinator, "one")
    watching = coordinator.commands.WatchCommands(WatchCommandsRequest(), timeout=20)
    first = snapshot(watching)
    assert [response.command.command_id for response in first] == [pending.command_id, ""]
    by_workload = coordinator.commands.WatchCommands(
        WatchCommandsRequest(worker="alpha", workload="other"), timeout=20
    )
    assert len(snapshot(by_workload)) == 1
    worker.succeed("suspend", reported(one, SUSPENDED, 2))
    later = suspend(coordinator, "other")
    revisions = []
    while True:
        command = next(watching).command
        if command.command_id == later.command_id:
            break
        assert command.command_id == pending.command_id
        revisions.append(command.revision)
    assert revisions == sorted({*revisions})
    assert command.state in (command_pb2.COMMAND_STATE_DISPATCHED, command_pb2.COMMAND_STATE_PENDING)
    assert next(by_workload).command.command_id == later.command_id
    worker.wait(lambda frame: frame.command.command.command_id == later.command_id)
    worker.update(later.command_id, command_pb2.COMMAND_STATE_SUCCEEDED, reported(other, SUSPENDED, 2))
    assert ended(coordinator, later.command_id)
    exit_workload(coordinator, worker, other, generation=3)
    deleted = coordinator.workloads.DeleteWorkload(DeleteWorkloadRequest(workload="other"))
    assert deleted.deleted_command_count == 2
    resumed = coordinator.commands.WatchCommands(
        WatchCommandsRequest(resume_token=first[-1].resume_token), timeout=20
    )
    for responses in (watching, by_workload, resumed):
        gone = {next(one.deleted_command_id for one in responses if one.deleted_command_id) for _ in "12"}
        assert later.command_id in gone
        assert len(gone) == 2
        responses.cancel()


def test_an_open_command_is_listed_with_each_of_its_workloads(tmp_path: Path) -> None:
    def of_owner(workload_id: str) -> Workload:
        made = workload(RUNNING, 1)
        made.workload_id, made.name, made.owner = workload_id, f"name-{workload_id}", "user/ann"
        return made

    async def scenario(bench: Bench) -> None:
        service = CommandService(bench.fleet.reader, bench.dispatcher)

        async def listed(workload_id: str) -> list[list[str]]:
            """The command, or nothing, by each of the ways to ask."""
            found = []
            for request in (
                ListCommandsRequest(workload=workload_id),
                ListCommandsRequest(filter=f"workload = {workload_id}"),
                ListCommandsRequest(filter=f"worker = x OR workload = name-{workload_id}"),
                ListCommandsRequest(workload=workload_id, filter=f"workload = {workload_id}"),
            ):
                response = await service.ListCommands(request, cast("Context", None))
                found.append([one.command_id for one in response.commands])
            watching = WatchCommandsRequest(filter=f"workload = {workload_id}")
            responses = service.WatchCommands(watching, cast("Context", None))
            told = (await read(cast("AsyncGenerator[WatchCommandsResponse]", responses), 1))[0]
            found.append([told.command.command_id] if told.HasField("command") else [])
            await cast("AsyncGenerator[WatchCommandsResponse]", responses).aclose()
            return found

        for workload_id in ("w-1", "w-2", "w-3"):
            await bench.fleet.save_workload(of_owner(workload_id))
        moves = [Move(workload_id="w-1"), Move(workload_id="w-2")]
        command = Command(command_id="c-1", worker_id="worker-alpha", workload_id="w-1", owners=["user/ann"])
        command.operation.remap.moves.extend(moves)
        await bench.dispatcher.create(command)
        for name, expected in (("ann", [["c-1"]] * 5), ("eve", [[]] * 5)):
            note_caller(Caller(Identity(Kind.USER, name), "ipv4:192.0.2.1"))
            assert await listed("w-1") == [["c-1"]] * 5
            assert await listed("w-2") == expected
            assert await listed("w-3") == [[]] * 5
        await bench.update(command_pb2.COMMAND_STATE_SUCCEEDED)
        note_caller(Caller(Identity(Kind.USER, "ann"), "ipv4:192.0.2.1"))
        for workload_id, found in (("w-1", ["c-1"]), ("w-2", [])):
            assert await listed(workload_id) == [*[found] * 4, []]

    on_bench(tmp_path, scenario)


def test_events_are_watched_from_a_bookmark_on(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    stub = EventServiceStub(coordinator.channel)
    watching = stub.WatchEvents(WatchEventsRequest(), timeout=20)
    bookmark = next(watching)
    assert bookmark.bookmark.snapshot_end
    started = start(coordinator, worker, "one", CPU)
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    of_workload = WatchEventsRequest(resume_token=bookmark.resume_token, workload="one")
    of_worker = WatchEventsRequest(resume_token=bookmark.resume_token, worker="beta")
    for request, subject in ((of_workload, started.workload_id), (of_worker, "worker-beta")):
        events: list[Event] = []
        responses = stub.WatchEvents(request, timeout=20)
        count = 3 if request is of_workload else 1
        while len(events) < count:
            events.append(next(responses).event)
        responses.cancel()
        assert all(subject in (event.workload_id, event.worker_id) for event in events)
        listed = stub.ListEvents(ListEventsRequest(worker=request.worker, workload=request.workload)).events
        assert list(reversed(listed))[-count:] == events
    assert next(watching).event.event_id
    watching.cancel()


def test_a_watch_of_what_is_not_known_is_refused(coordinator: CoordinatorProcess) -> None:
    events = EventServiceStub(coordinator.channel)
    for call in (
        lambda: next(coordinator.commands.WatchCommands(WatchCommandsRequest(resume_token="x.1"))),
        lambda: next(events.WatchEvents(WatchEventsRequest(resume_token="x.1"))),
    ):
        assert refusal(call)[1] == "INVALID_TOKEN"
    watch_worker: Any = coordinator.commands.WatchCommands(WatchCommandsRequest(worker="x"))
    assert refusal(lambda: next(watch_worker))[1] == "UNKNOWN_WORKER"
    watch_workload: Any = events.WatchEvents(WatchEventsRequest(workload="x"))
    assert refusal(lambda: next(watch_workload))[1] == "UNKNOWN_WORKLOAD"
    for badly_filtered in (
        lambda: next(coordinator.commands.WatchCommands(WatchCommandsRequest(filter="colour = red"))),
        lambda: next(events.WatchEvents(WatchEventsRequest(filter="colour = red"))),
    ):
        assert refusal(badly_filtered)[1] == "INVALID_ARGUMENT"


def test_what_retention_deletes_is_told(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        reader = bench.fleet.reader
        await bench.send()
        await bench.update(command_pb2.COMMAND_STATE_SUCCEEDED, workload(EXITED, 2))
        with reader.workload_hub.subscribe("w-1") as workloads, reader.command_hub.subscribe() as commands:
            await prune(reader, 3600)
            await prune(reader, -1)
            deletion = await anext(workloads.changes())
            assert deletion is not None
            assert deletion.message.deleted_workload_id == "w-1"
            gone = await anext(commands.changes())
            assert gone is not None
            assert gone.message.deleted_command_id == "c-1"
        assert await reader.find_command("c-1") is None

    on_bench(tmp_path, scenario)


def test_a_label_is_a_change_and_a_deleted_workload_is_a_deletion(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker, "one", CPU)
    watching = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(), timeout=20)
    token = snapshot(watching)[-1].resume_token
    change = Workload(workload_id="one", labels={"team": "a"})
    coordinator.workloads.UpdateWorkload(UpdateWorkloadRequest(workload=change))
    assert dict(next(watching).workload.labels) == {"team": "a"}
    exit_workload(coordinator, worker, started)
    coordinator.workloads.DeleteWorkload(DeleteWorkloadRequest(workload="one"))
    resumed = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(resume_token=token), timeout=20)
    for responses, expected in ((watching, 2), (resumed, 3)):
        told = [next(responses) for _ in range(expected)]
        assert told[-1].deleted_workload_id == started.workload_id
        assert told[-2].workload.status.state == EXITED
        responses.cancel()


def test_an_entry_that_does_not_match_the_filter_any_more_is_a_deletion(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker, "one", CPU)
    matching, other = (
        coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(filter=text), timeout=20)
        for text in ("state = RUNNING", "state = SUSPENDED")
    )
    assert len(snapshot(matching)) == 2
    assert len(snapshot(other)) == 1
    suspend(coordinator, "one")
    worker.succeed("suspend", reported(started, SUSPENDED, 2))
    assert next(matching).deleted_workload_id == started.workload_id
    assert next(other).workload.status.state == SUSPENDED
    beta = WatchFleetRequest(filter="name = beta")
    fleet = coordinator.fleet.WatchFleet(beta, timeout=20)
    assert len(snapshot(fleet)) == 1
    coordinator.connect(make_hello("beta", gpu_count=1)).welcome()
    while next(fleet).worker.name != "beta":
        pass
    for responses in (matching, other, fleet):
        responses.cancel()


def test_commands_and_events_are_filtered(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    started = start(coordinator, worker, "one", CPU)
    wanted = "state = PENDING OR state = DISPATCHED OR state = RUNNING"
    opened, ended_well = (
        coordinator.commands.WatchCommands(WatchCommandsRequest(filter=text), timeout=20)
        for text in (f"operation = suspend AND ({wanted})", "state = SUCCEEDED")
    )
    events = EventServiceStub(coordinator.channel).WatchEvents(
        WatchEventsRequest(filter="kind = COMMAND_ENDED AND workload = one"), timeout=20
    )
    for responses in (opened, ended_well):
        assert len(snapshot(responses)) == 1
    assert next(events).bookmark.snapshot_end
    command = suspend(coordinator, "one")
    assert next(opened).command.command_id == command.command_id
    worker.succeed("suspend", reported(started, SUSPENDED, 2))
    assert next(one for one in opened if one.deleted_command_id).deleted_command_id == command.command_id
    shown = next(one.command for one in ended_well if one.HasField("command"))
    assert (shown.command_id, shown.state) == (command.command_id, command_pb2.COMMAND_STATE_SUCCEEDED)
    assert next(events).event.command_id == command.command_id
    opened.cancel()
    ended_well.cancel()
    events.cancel()


def event_watch(bench: Bench, text: str) -> AsyncGenerator[WatchEventsResponse]:
    service = EventService(bench.fleet.reader, bench.fleet.events, bench.fleet.lease_history)
    watching = service.WatchEvents(WatchEventsRequest(filter=text), cast("Context", None))
    return cast("AsyncGenerator[WatchEventsResponse]", watching)


def test_the_filter_of_a_watch_runs_in_the_turn_of_its_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's report has thousands of events, and clients have hundreds of watches with long filters."""
    looked_at = 0

    def count(wanted: Filter[Event], event: Event) -> bool:
        nonlocal looked_at
        looked_at += 1
        return matches(wanted, event)

    async def scenario(bench: Bench) -> None:
        monkeypatch.setattr(event_service, "matches", count)
        watching = event_watch(bench, "kind = CORDON")
        assert (await anext(watching)).bookmark.snapshot_end
        following = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0)
        other, cordon = Event(event_id="e-1"), Event(event_id="e-2", kind=EVENT_KIND_CORDON)
        for event in (other, cordon):
            bench.fleet.events.publish(event)
        assert looked_at == 0
        assert (await asyncio.wait_for(following, 20)).event == cordon
        assert looked_at == 2
        await watching.aclose()

    on_bench(tmp_path, scenario)


def test_a_watch_of_which_no_change_passes_has_bookmarks_and_leaves_the_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_hub, "BOOKMARK_INTERVAL_S", 0.001)

    async def scenario(bench: Bench) -> None:
        hub = bench.fleet.reader.event_hub
        watching = event_watch(bench, "kind = CORDON")
        assert (await anext(watching)).bookmark.snapshot_end
        following = asyncio.ensure_future(anext(watching))
        published = 0
        while not following.done():  # a change always waits, so the watch is never quiet
            for _ in range(2):
                published += 1
                bench.fleet.events.publish(Event(event_id=f"e-{published}"))
            await asyncio.sleep(0)
        marked = await following
        assert marked.HasField("bookmark")
        left = [change.message.event.event_id for change in hub.since(marked.resume_token)]
        assert left, "the token covers only changes that were looked at"
        assert left[-1] == f"e-{published}"
        await watching.aclose()

    on_bench(tmp_path, scenario)
