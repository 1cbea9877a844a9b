"""Users act on their own workloads, and learn nothing of those of others but the permitted fields."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import grpc
import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import (
    CancelCommandRequest,
    GetCommandRequest,
    ListCommandsRequest,
    WatchCommandRequest,
    WatchCommandsRequest,
)
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.event_service_pb2 import ListEventsRequest, ListLeaseHistoryRequest, WatchEventsRequest
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.fleet_service_pb2 import (
    GetGpuRequest,
    ListGpusRequest,
    ListWorkersRequest,
    WatchFleetRequest,
)
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.lease_pb2 import SLOT_STATE_LEASED, ForeignProcess, GpuLease, Lease
from leasehold.v1.operation_pb2 import (
    DeleteCheckpointsOperation,
    Move,
    RemapOperation,
    RestoreOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.v1.workload_pb2 import HelperTerms, Resources, Workload, WorkloadSpec, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    CheckpointWorkloadRequest,
    CreateWorkloadRequest,
    DeleteCheckpointsRequest,
    DeleteWorkloadRequest,
    GetWorkloadRequest,
    ListCheckpointsRequest,
    ListWorkloadsRequest,
    PlanRequest,
    ReadWorkloadOutputRequest,
    ReleaseHoldRequest,
    ReleaseWorkloadRequest,
    RemapWorkloadsRequest,
    RestoreWorkloadRequest,
    StopWorkloadRequest,
    SuspendWorkloadRequest,
    UpdateWorkloadRequest,
    WatchWorkloadsRequest,
)
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold.worker.v1.session_pb2 import CheckpointAnswer, ConnectRequest, WorkerLoad, WorkloadEvent
from leasehold_coordinator.access.roles import Role

from tests.coordinator.api.test_roles import grant, refusal
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.unix_users import ANN, BEN, channel_as, identity, needs_root

pytestmark = needs_root

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
_NUMBERS: Final = count(1)


@dataclass(frozen=True, slots=True)
class Client:
    """The stubs of one user."""

    workloads: WorkloadServiceStub
    commands: CommandServiceStub
    fleet: FleetServiceStub
    events: EventServiceStub


def client_of(channel: grpc.Channel) -> Client:
    """The stubs on a channel."""
    return Client(
        WorkloadServiceStub(channel),
        CommandServiceStub(channel),
        FleetServiceStub(channel),
        EventServiceStub(channel),
    )


@dataclass(frozen=True, slots=True)
class Scene:
    """A worker and three clients: an admin, and two users."""

    root: Client
    ann: Client
    ben: Client
    worker: ScriptedWorker
    coordinator: CoordinatorProcess

    def answer(self, command: Command, *workloads: Workload) -> None:
        """The worker carries out a command."""
        command_id = command.command_id
        self.worker.wait(lambda frame: frame.command.command.command_id == command_id)
        self.worker.update(command_id, command_pb2.COMMAND_STATE_ACCEPTED)
        self.worker.update(command_id, command_pb2.COMMAND_STATE_SUCCEEDED, *workloads)
        self.worker.wait(lambda frame: frame.command_ack.command_id == command_id)

    def run(self, client: Client, name: str = "", **fields: Any) -> Workload:
        """A running workload of a client."""
        name = name or f"workload-{next(_NUMBERS)}"
        fields.setdefault("spec", WorkloadSpec(arguments=["true"], resources=Resources()))
        created = client.workloads.CreateWorkload(CreateWorkloadRequest(name=name, worker="alpha", **fields))
        status = WorkloadStatus(state=RUNNING, generation=1, lease=Lease(gpu_uuids=["GPU-alpha-0"]))
        self.answer(created.command, Workload(workload_id=created.workload.workload_id, status=status))
        return created.workload


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A coordinator with the worker alpha and two users."""
    coordinator = CoordinatorProcess(tmp_path_factory.mktemp("owners"), load_interval_s=600)
    coordinator.start()
    with ExitStack() as stack:
        channels = []
        for uid in (ANN, BEN):
            grant(coordinator, uid, Role.USER)
            channels.append(stack.enter_context(channel_as(coordinator.folder / "store.sock", uid)))
        worker = coordinator.connect(make_hello(gpu_count=4))
        stack.callback(worker.close)
        worker.welcome()
        ann, ben = map(client_of, channels)
        yield Scene(client_of(coordinator.channel), ann, ben, worker, coordinator)
    assert coordinator.end(signal.SIGTERM) == 0
    assert "Traceback" not in coordinator.log()


def test_names_collide_among_the_workloads_of_one_owner_only(scene: Scene) -> None:
    """No worker and no other user can deny a name to a user."""
    reported = [
        Workload(workload_id=one, name=name, status=WorkloadStatus(state=RUNNING, generation=1))
        for one, name in (("squat-1", "wanted"), ("squat-2", "wanted"), ("squat-id", "other"))
    ]
    for one in reported:
        scene.worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=one)))
    while len(listed(scene, "squat-id")) != 1:
        pass
    for name in ("wanted", "squat-id"):
        for client in (scene.ann, scene.ben):
            own = scene.run(client, name)
            asked = GetWorkloadRequest(workload=name)
            assert client.workloads.GetWorkload(asked).workload.workload_id == own.workload_id
            request = CreateWorkloadRequest(name=name, spec=WorkloadSpec(arguments=["true"]))
            assert reason_of(partial(client.workloads.CreateWorkload, request)) == "WORKLOAD_EXISTS"
    own_id = CreateWorkloadRequest(name=own.workload_id, spec=WorkloadSpec(arguments=["true"]))
    assert reason_of(lambda: scene.ann.workloads.CreateWorkload(own_id)) == "WORKLOAD_EXISTS", (
        "of the user Ben"
    )


def listed(scene: Scene, workload_id: str) -> list[Workload]:
    """The workloads with this id."""
    asked = ListWorkloadsRequest(filter=f"workload = {workload_id}")
    return list(scene.root.workloads.ListWorkloads(asked).workloads)


def reason_of(call: Callable[[], object]) -> str:
    """The reason of a refusal."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    return refusal(error.value)[0]


SECRET = "SECRET"
SECRETS = WorkloadSpec(
    arguments=["python", SECRET],
    environment={SECRET: SECRET},
    working_directory=f"/{SECRET}",
    resources=Resources(gpu_count=1, gpu_name="H100"),
)


def everything(client: Client) -> list[Message]:
    """What a client reads of the fleet."""
    read: list[Message] = [
        *client.workloads.ListWorkloads(ListWorkloadsRequest(include_ended=True)).workloads,
        *client.commands.ListCommands(ListCommandsRequest()).commands,
        *client.events.ListEvents(ListEventsRequest(page_size=1000)).events,
        *client.fleet.ListGpus(ListGpusRequest()).gpus,
        client.fleet.GetGpu(GetGpuRequest(uuid="GPU-alpha-0")),
    ]
    read += [
        client.workloads.GetWorkload(GetWorkloadRequest(workload=one.workload_id))
        for one in list(read)
        if isinstance(one, Workload)
    ]
    for command in list(read):
        if isinstance(command, Command):
            asked = GetCommandRequest(command_id=command.command_id)
            read.append(client.commands.GetCommand(asked))
            watched = client.commands.WatchCommand(WatchCommandRequest(command_id=command.command_id))
            read.append(next(watched))
            watched.cancel()
    watches: tuple[Any, ...] = (
        client.workloads.WatchWorkloads(WatchWorkloadsRequest(), timeout=20),
        client.commands.WatchCommands(WatchCommandsRequest(), timeout=20),
        client.fleet.WatchFleet(WatchFleetRequest(), timeout=20),
    )
    for watch in watches:
        while not (response := next(watch)).bookmark.snapshot_end:
            read.append(response)
        watch.cancel()
    return read


def test_others_see_the_permitted_fields_only(scene: Scene) -> None:
    watched = scene.ben.workloads.WatchWorkloads(WatchWorkloadsRequest(), timeout=20)
    while not next(watched).bookmark.snapshot_end:
        pass
    workload = scene.run(
        scene.ann,
        spec=SECRETS,
        labels={"team": SECRET},
        annotations={"note": SECRET},
        request_id=SECRET,
    )
    foreign = ForeignProcess(pid=1, user="eve", command=SECRET)
    leases = list(scene.worker.first.hello.gpu_leases)
    leases[3].foreign_processes.append(foreign)
    scene.worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=leases)))
    while SECRET not in str(scene.root.events.ListEvents(ListEventsRequest(filter="kind = GPU_FOREIGN"))):
        pass

    for found in everything(scene.ben):
        assert SECRET not in str(found), found
    for _ in range(2):
        assert SECRET not in str(next(watched)), "a change that is published to all"
    watched.cancel()
    for client in (scene.ann, scene.root):
        assert sum(SECRET in str(one) for one in everything(client)) >= 6

    seen = scene.ben.workloads.GetWorkload(GetWorkloadRequest(workload=workload.name)).workload
    assert (seen.workload_id, seen.name, seen.owner) == (
        workload.workload_id,
        workload.name,
        identity(ANN),
    )
    assert seen.status.state == RUNNING
    assert seen.status.lease.gpu_uuids == ["GPU-alpha-0"]


def test_a_filter_on_a_hidden_field_reveals_nothing(scene: Scene) -> None:
    name = scene.run(scene.ann, spec=SECRETS, labels={"team": SECRET}, request_id="hidden").name
    for text in (f"labels.team = {SECRET}", "labels:team", "origin = RUN", "gpu_name = H100"):
        filtered = ListWorkloadsRequest(filter=f"name = {name} AND {text}")
        watched = WatchWorkloadsRequest(filter=filtered.filter)
        assert not scene.ben.workloads.ListWorkloads(filtered).workloads, text
        response = next(scene.ben.workloads.WatchWorkloads(watched, timeout=20))
        assert response.bookmark.snapshot_end, text
    for text in ("request_id = hidden", f'actor = "{identity(ANN)}"', "end_time:*"):
        filtered_commands = ListCommandsRequest(filter=text, workload=name)
        assert not scene.ben.commands.ListCommands(filtered_commands).commands, text
        assert scene.ann.commands.ListCommands(filtered_commands).commands, text
    events = ListEventsRequest(filter=f"message:{name}")
    assert not scene.ben.events.ListEvents(events).events
    assert scene.ann.events.ListEvents(events).events
    owned = ListWorkloadsRequest(filter=f'name = {name} AND owner = "{identity(ANN)}"')
    assert scene.ben.workloads.ListWorkloads(owned).workloads, "the owner is permitted"


def test_the_lease_history_of_others_has_no_owner_and_no_lease(scene: Scene) -> None:
    workload = scene.run(scene.ann)
    lease = GpuLease(
        gpu_uuid="GPU-alpha-0", state=SLOT_STATE_LEASED, workload_id=workload.workload_id, lease_id="l-1"
    )
    leases = [lease, *scene.worker.first.hello.gpu_leases[1:]]
    scene.worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1_000, gpu_leases=leases)))
    asked = ListLeaseHistoryRequest(workload=workload.workload_id)
    while not scene.root.events.ListLeaseHistory(asked).spans:
        pass
    for client in (scene.ann, scene.ben):
        (span,) = client.events.ListLeaseHistory(asked).spans
        assert (span.gpu_uuid, span.workload_name) == ("GPU-alpha-0", workload.name)
        assert (bool(span.owner), bool(span.lease_id)) == (client is scene.ann,) * 2


def test_events_of_others_have_no_message(scene: Scene) -> None:
    watches = {
        client: client.events.WatchEvents(WatchEventsRequest(), timeout=20)
        for client in (scene.ann, scene.ben)
    }
    for watch in watches.values():
        assert next(watch).bookmark.snapshot_end
    name = scene.run(scene.ann).name
    for client, watch in watches.items():
        while (event := next(watch).event).workload_name != name:
            pass
        assert event.kind
        assert event.worker_id == "worker-alpha"
        seen = (bool(event.message), bool(event.actor), bool(event.owner))
        assert seen == (client is scene.ann,) * 3
        watch.cancel()
    about = WatchEventsRequest(filter=f"message:{name}")
    filtered = scene.ben.events.WatchEvents(about, timeout=20)
    assert next(filtered).bookmark.snapshot_end
    scene.run(scene.ann, f"{name}-again")
    own = scene.run(scene.ben, f"{name}-own").workload_id
    assert next(filtered).event.workload_id == own
    filtered.cancel()


def test_a_token_of_a_watch_belongs_to_its_view(scene: Scene) -> None:
    tokens = {}
    for client in (scene.root, scene.ann, scene.ben):
        watch = client.workloads.WatchWorkloads(WatchWorkloadsRequest(), timeout=20)
        while not (response := next(watch)).bookmark.snapshot_end:
            pass
        tokens[client] = response.resume_token
        watch.cancel()
    scene.run(scene.ann)
    for client in tokens:
        for giver, token in tokens.items():
            asked = WatchWorkloadsRequest(resume_token=token)
            watch = client.workloads.WatchWorkloads(asked, timeout=20)
            if giver is client:
                assert next(watch).HasField("workload")
            else:
                assert reason_of(lambda: next(watch)) == "INVALID_TOKEN"  # noqa: B023
            watch.cancel()


def operations(name: str, own: str) -> dict[str, Message]:
    """A request of each method that changes a workload."""
    pairs = [GpuPair(old_uuid="GPU-alpha-0", new_uuid="GPU-alpha-1")]
    moves = [Move(workload_id=own, pairs=pairs), Move(workload_id=name, pairs=pairs)]
    return {
        "UpdateWorkload": UpdateWorkloadRequest(workload=Workload(workload_id=name, labels={"a": "b"})),
        "DeleteWorkload": DeleteWorkloadRequest(workload=name),
        "SuspendWorkload": SuspendWorkloadRequest(workload=name, operation=SuspendOperation()),
        "RestoreWorkload": RestoreWorkloadRequest(workload=name, operation=RestoreOperation()),
        "RemapWorkloads": RemapWorkloadsRequest(operation=RemapOperation(moves=moves)),
        "Plan": PlanRequest(workload=name, suspend=SuspendOperation()),
        "CheckpointWorkload": CheckpointWorkloadRequest(workload=name),
        "ListCheckpoints": ListCheckpointsRequest(workload=name),
        "StopWorkload": StopWorkloadRequest(workload=name, operation=StopOperation()),
        "ReleaseWorkload": ReleaseWorkloadRequest(workload=name),
        "CreateWorkload": CreateWorkloadRequest(
            spec=WorkloadSpec(arguments=["true"]), preempt=[own, name], worker="alpha"
        ),
    }


def test_every_operation_on_a_workload_of_others_is_refused(scene: Scene) -> None:
    workload, own = scene.run(scene.ann), scene.run(scene.ben)
    before = len(scene.root.commands.ListCommands(ListCommandsRequest()).commands)
    for wrong in (
        {},
        {"expected_generation": 999},
        {"request_id": "any"},
        {"etag": "wrong"},
        {"validate_only": True},
    ):
        for method, request in operations(workload.name, own.name).items():
            known = {
                name: value for name, value in wrong.items() if name in request.DESCRIPTOR.fields_by_name
            }
            asked = type(request)(**known)
            asked.MergeFrom(request)
            call = getattr(scene.ben.workloads, method)
            assert reason_of(lambda: call(asked)) == "NOT_PERMITTED", (method, known)  # noqa: B023
    output = ReadWorkloadOutputRequest(workload=workload.name)
    assert reason_of(lambda: next(scene.ben.workloads.ReadWorkloadOutput(output))) == "NOT_PERMITTED"
    with pytest.raises(grpc.RpcError) as error:
        scene.ben.workloads.StopWorkload(StopWorkloadRequest(workload=workload.name))
    assert f"workload {workload.name} belongs to {identity(ANN)}" in refusal(error.value)[1]
    assert len(scene.root.commands.ListCommands(ListCommandsRequest()).commands) == before


def test_request_ids_are_those_of_an_identity(scene: Scene) -> None:
    asked = CreateWorkloadRequest(spec=SECRETS, worker="alpha", request_id="same")
    first = scene.ann.workloads.CreateWorkload(asked)
    second = scene.ben.workloads.CreateWorkload(asked)
    assert first.command.command_id != second.command.command_id
    assert (first.workload.owner, second.workload.owner) == (identity(ANN), identity(BEN))
    for client, command in ((scene.ann, first.command), (scene.ben, second.command)):
        assert client.workloads.CreateWorkload(asked).command.command_id == command.command_id
        scene.answer(command)
        again = client.workloads.CreateWorkload(asked).command
        assert (again.command_id, again.state) == (command.command_id, command_pb2.COMMAND_STATE_SUCCEEDED)


def test_a_command_is_cancelled_by_its_owner_or_actor_only(scene: Scene) -> None:
    workload = scene.run(scene.ann)
    for client in (scene.ann, scene.root):
        suspend = SuspendWorkloadRequest(workload=workload.workload_id, operation=SuspendOperation())
        command = client.workloads.SuspendWorkload(suspend).command
        cancel = CancelCommandRequest(command_id=command.command_id)
        assert reason_of(lambda: scene.ben.commands.CancelCommand(cancel)) == "NOT_PERMITTED"  # noqa: B023
        assert scene.ann.commands.CancelCommand(cancel).command.command_id == command.command_id
        scene.answer(command)


def test_a_hold_is_the_actors(scene: Scene) -> None:
    hold = SuspendOperation(hold_for=duration_pb2.Duration(seconds=60))
    suspend = SuspendWorkloadRequest(workload=scene.run(scene.ann).workload_id, operation=hold)
    command = scene.ann.workloads.SuspendWorkload(suspend).command
    hold_id = command.command_id
    scene.answer(command)
    own = scene.run(scene.ben).workload_id
    spec = WorkloadSpec(arguments=["true"], resources=Resources())
    ben = scene.ben.workloads
    create = CreateWorkloadRequest(spec=spec, hold_id=hold_id)
    restore = RestoreWorkloadRequest(workload=own, operation=RestoreOperation(hold_id=hold_id))
    assert reason_of(lambda: ben.CreateWorkload(create)) == "UNKNOWN_HOLD"
    assert reason_of(lambda: ben.RestoreWorkload(restore)) == "UNKNOWN_HOLD"
    assert reason_of(lambda: ben.ReleaseHold(ReleaseHoldRequest(hold_id=hold_id))) == "UNKNOWN_HOLD"
    assert reason_of(lambda: ben.ReleaseHold(ReleaseHoldRequest(hold_id="c-none"))) == "UNKNOWN_HOLD"
    scene.answer(scene.ann.workloads.ReleaseHold(ReleaseHoldRequest(hold_id=hold_id)).command)


def test_users_preempt_what_its_owner_made_preemptible(scene: Scene) -> None:
    spec = WorkloadSpec(arguments=["true"], resources=Resources(), helper=HelperTerms())
    helper = scene.run(scene.ann, spec=spec)
    asked = CreateWorkloadRequest(spec=SECRETS, preempt=[helper.name])
    in_vain = CreateWorkloadRequest(spec=spec, preempt=[helper.name])
    assert reason_of(lambda: scene.ben.workloads.CreateWorkload(in_vain)) == "INVALID_ARGUMENT"
    created = scene.ben.workloads.CreateWorkload(asked)
    assert set(created.command.owners) == {identity(ANN), identity(BEN)}
    seen = scene.ann.commands.GetCommand(GetCommandRequest(command_id=created.command.command_id))
    assert SECRET not in str(seen)
    scene.answer(created.command)


def test_only_operators_give_high_priorities(scene: Scene) -> None:
    for priority, client, is_permitted in (
        (1, scene.ben, False),
        (0, scene.ben, True),
        (9, scene.root, True),
    ):
        spec = WorkloadSpec(arguments=["true"], resources=Resources(), priority=priority)
        asked = CreateWorkloadRequest(spec=spec, worker="alpha")
        if is_permitted:
            scene.answer(client.workloads.CreateWorkload(asked).command)
        else:
            assert reason_of(lambda: client.workloads.CreateWorkload(asked)) == "NOT_PERMITTED"  # noqa: B023


def test_names_are_those_of_own_workloads_first(scene: Scene) -> None:
    ended = scene.run(scene.ben, "shared")
    stop = scene.ben.workloads.StopWorkload(StopWorkloadRequest(workload="shared")).command
    over = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_EXITED, generation=2)
    scene.answer(stop, Workload(workload_id=ended.workload_id, status=over))
    living = scene.run(scene.ann, "shared")
    found = {
        client: client.workloads.GetWorkload(GetWorkloadRequest(workload="shared")).workload.workload_id
        for client in (scene.root, scene.ann, scene.ben)
    }
    assert found == {
        scene.root: living.workload_id,
        scene.ann: living.workload_id,
        scene.ben: ended.workload_id,
    }


def test_users_name_no_gpus_ahead_of_waiting_claims(scene: Scene) -> None:
    leases = list(scene.worker.first.hello.gpu_leases)
    load = WorkerLoad(sequence=2_000, gpu_leases=leases, pending_claimers=1)
    scene.worker.up.put(ConnectRequest(worker_load=load))
    while scene.root.fleet.ListWorkers(ListWorkersRequest()).workers[0].pending_claimers != 1:
        pass
    spec = WorkloadSpec(arguments=["true"], resources=Resources())
    named = CreateWorkloadRequest(spec=spec, gpu_uuids=["GPU-alpha-2"])
    assert reason_of(lambda: scene.ben.workloads.CreateWorkload(named)) == "NOT_PERMITTED"
    own = scene.run(scene.ben).workload_id
    pairs = [GpuPair(old_uuid="GPU-alpha-0", new_uuid="GPU-alpha-2")]
    remap = RemapWorkloadsRequest(operation=RemapOperation(moves=[Move(workload_id=own, pairs=pairs)]))
    assert reason_of(lambda: scene.ben.workloads.RemapWorkloads(remap)) == "NOT_PERMITTED"
    scene.answer(scene.root.workloads.CreateWorkload(named).command)
    load.sequence, load.pending_claimers = 2_001, 0
    scene.worker.up.put(ConnectRequest(worker_load=load))
    while scene.root.fleet.ListWorkers(ListWorkersRequest()).workers[0].pending_claimers:
        pass
    scene.answer(scene.ben.workloads.RemapWorkloads(remap).command)


def test_checkpoints_are_their_owners(scene: Scene) -> None:
    workload = scene.run(scene.ann)
    answered = count()

    def asking(call: Callable[[], Any]) -> Any:
        """Makes a call, during which the worker lists its checkpoints."""
        checkpoints = [
            Checkpoint(checkpoint_id="k-1", workload_id=workload.workload_id, owner=identity(BEN)),
            Checkpoint(checkpoint_id="k-2", workload_id="w-forgotten", owner=identity(BEN)),
        ]
        with ThreadPoolExecutor(1) as threads:
            made = threads.submit(call)
            scene.worker.answer_checkpoints(CheckpointAnswer(checkpoints=checkpoints), next(answered))
            return made.result(20)

    def listed(client: Client) -> list[str]:
        found = asking(lambda: client.workloads.ListCheckpoints(ListCheckpointsRequest(worker="alpha")))
        return sorted(one.checkpoint_id for one in found.checkpoints)

    assert (listed(scene.root), listed(scene.ann), listed(scene.ben)) == (["k-1", "k-2"], ["k-1"], ["k-2"])
    spec = WorkloadSpec(arguments=["true"], resources=Resources())
    own = scene.run(scene.ben).workload_id
    delete = DeleteCheckpointsRequest(
        worker="alpha", operation=DeleteCheckpointsOperation(checkpoint_ids=["k-2", "k-1"])
    )
    run = CreateWorkloadRequest(spec=spec, worker="alpha", checkpoint_id="k-1")
    restore = RestoreWorkloadRequest(workload=own, operation=RestoreOperation(checkpoint_id="k-1"))
    for call in (
        lambda: scene.ben.workloads.DeleteCheckpoints(delete),
        lambda: scene.ben.workloads.CreateWorkload(run),
        lambda: scene.ben.workloads.RestoreWorkload(restore),
    ):
        assert reason_of(lambda: asking(call)) == "UNKNOWN_CHECKPOINT"  # noqa: B023
    beta = scene.coordinator.connect(make_hello("beta", gpu_count=0))
    beta.welcome()
    restore.operation.checkpoint_id = "k-2"
    assert reason_of(lambda: asking(lambda: scene.ben.workloads.RestoreWorkload(restore))) == "WRONG_STATE"
    assert not any(frame.HasField("checkpoint_query") for frame in beta.frames), "it could veto the restore"
    beta.close()
    scene.answer(asking(lambda: scene.ann.workloads.CreateWorkload(run)).command)
