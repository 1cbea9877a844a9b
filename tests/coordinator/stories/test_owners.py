"""Who created a workload, and whose request led to commands and events."""

import os
import pwd

from leasehold.v1 import workload_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.event_pb2 import (
    EVENT_KIND_COMMAND_CREATED,
    EVENT_KIND_COMMAND_ENDED,
    EVENT_KIND_WORKER_CONNECTED,
)
from leasehold.v1.event_service_pb2 import ListEventsRequest
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    GetWorkloadRequest,
    ListWorkloadsRequest,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent

from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker
from tests.coordinator.stories.test_foreign_clients import carry_out_the_first

OWN = f"local/{pwd.getpwuid(os.geteuid()).pw_name}"


def create(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> Workload:
    """A workload of this client, whose run succeeds."""
    spec = WorkloadSpec(arguments=["true"], resources=Resources(gpu_count=1))
    created = coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="mine", spec=spec))
    carry_out_the_first(worker)
    return created.workload


def test_a_workload_belongs_to_its_creator(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    workload = create(coordinator, worker)
    assert workload.owner == OWN
    worker.up.put(
        ConnectRequest(
            workload_event=WorkloadEvent(
                workload=Workload(
                    workload_id=workload.workload_id,
                    name="mine",
                    owner="local/thief",
                    status=WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1),
                )
            )
        )
    )
    found = wait_running(coordinator, workload.workload_id)
    assert found.owner == OWN, "no worker decides that"
    coordinator.restart()
    asked = GetWorkloadRequest(workload="mine")
    assert coordinator.workloads.GetWorkload(asked).workload.owner == OWN


def wait_running(coordinator: CoordinatorProcess, workload_id: str) -> Workload:
    """The workload, once it runs."""
    while True:
        found = coordinator.workloads.GetWorkload(GetWorkloadRequest(workload=workload_id)).workload
        if found.status.state == workload_pb2.WORKLOAD_STATE_RUNNING:
            return found


def test_a_workload_of_a_host_belongs_to_the_hosts_user(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    for number, user in enumerate(("ann", "")):
        worker.up.put(
            ConnectRequest(
                workload_event=WorkloadEvent(
                    workload=Workload(
                        workload_id=f"w-host-{number}",
                        owner=OWN,
                        user=user,
                        origin=workload_pb2.WORKLOAD_ORIGIN_EXEC,
                        status=WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1),
                    )
                )
            )
        )
    owners = [wait_known(coordinator, f"w-host-{number}").owner for number in range(2)]
    assert owners == ["host/alpha/ann", "host/alpha"]
    listed = coordinator.workloads.ListWorkloads(ListWorkloadsRequest(filter='owner = "host/alpha/ann"'))
    assert [one.workload_id for one in listed.workloads] == ["w-host-0"]


def wait_known(coordinator: CoordinatorProcess, workload_id: str) -> Workload:
    """The workload, once its worker has reported it."""
    while True:
        listed = coordinator.workloads.ListWorkloads(ListWorkloadsRequest(filter=f"workload = {workload_id}"))
        if listed.workloads:
            return listed.workloads[0]


def test_commands_and_events_name_who_asked(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    create(coordinator, worker)
    (command,) = coordinator.commands.ListCommands(ListCommandsRequest(filter=f'actor = "{OWN}"')).commands
    assert command.actor == OWN
    stub = EventServiceStub(coordinator.channel)
    wanted = {EVENT_KIND_COMMAND_CREATED, EVENT_KIND_COMMAND_ENDED}
    while True:
        events = stub.ListEvents(ListEventsRequest()).events
        if wanted <= {event.kind for event in events}:
            break
    assert {event.actor for event in events if event.kind in wanted} == {OWN}
    assert {event.actor for event in events if event.kind == EVENT_KIND_WORKER_CONNECTED} == {""}
    mine = stub.ListEvents(ListEventsRequest(filter=f'actor = "{OWN}"')).events
    assert wanted <= {event.kind for event in mine}
