"""What clients read: no secrets, nothing free that is not, and nothing stale as if it were now."""

from collections.abc import Iterator

import pytest
from leasehold.v1 import lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_service_pb2 import (
    CancelCommandRequest,
    GetCommandRequest,
    ListCommandsRequest,
    WatchCommandRequest,
)
from leasehold.v1.fleet_service_pb2 import (
    GetGpuRequest,
    GetWorkerRequest,
    ListGpusRequest,
    ListWorkersRequest,
)
from leasehold.v1.lease_pb2 import Cordon, SlotState
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    GetWorkloadRequest,
    ListWorkloadsRequest,
    WatchWorkloadsRequest,
    WatchWorkloadsResponse,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkerLoad

from tests.coordinator.api.test_command_service import start
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until
from tests.coordinator.stories.test_newcomers import alpha_state, running

SECRET = "s3cret"
VARIABLES = {"TOKEN": SECRET, **{f"SECRET_{number}": SECRET for number in range(20)}}
SPEC = WorkloadSpec(arguments=["program"], environment=VARIABLES)


def test_values_of_variables_reach_the_worker_and_no_client(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    watching = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(), timeout=20)
    token = next(watching).resume_token
    created = coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="one", spec=SPEC))
    workload, command_id = created.workload.workload_id, created.command.command_id
    assert worker.command("run").command.operation.run.spec.environment == VARIABLES
    worker.succeed("run", running(workload, "one"))
    calls, commands = coordinator.workloads, coordinator.commands
    read: list[object] = [
        created,
        calls.GetWorkload(GetWorkloadRequest(workload="one")),
        calls.ListWorkloads(ListWorkloadsRequest()),
        next(calls.WatchWorkloads(WatchWorkloadsRequest(), timeout=20)),
        next(calls.WatchWorkloads(WatchWorkloadsRequest(resume_token=token), timeout=20)),
        next(watching),
        commands.GetCommand(GetCommandRequest(command_id=command_id)),
        commands.ListCommands(ListCommandsRequest()),
        *commands.WatchCommand(WatchCommandRequest(command_id=command_id), timeout=20),
        commands.CancelCommand(CancelCommandRequest(command_id=command_id)),
    ]
    for message in read:
        assert SECRET not in str(message)
        assert "TOKEN" in str(message), "names are told"
    coordinator.restart()
    assert SECRET not in str(coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="one")))


def test_a_command_that_waits_keeps_its_values(coordinator: CoordinatorProcess) -> None:
    first = coordinator.connect()
    first.welcome()
    coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="one", spec=SPEC))
    first.command("run")
    coordinator.restart()
    frame = coordinator.connect().command("run")
    assert frame.command.operation.run.spec.environment == VARIABLES


def workload_of(coordinator: CoordinatorProcess) -> Workload:
    return coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="one")).workload


def test_a_workload_of_a_worker_out_of_contact_is_as_of_its_last_report(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    assert not workload_of(coordinator).out_of_contact
    worker.close()
    until(lambda: alpha_state(coordinator) == worker_pb2.WORKER_STATE_STALE)
    stale = workload_of(coordinator)
    assert stale.status.state == workload_pb2.WORKLOAD_STATE_RUNNING
    assert stale.out_of_contact
    seen = coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker.last_seen_time
    assert stale.report_time == seen
    (listed,) = coordinator.workloads.ListWorkloads(ListWorkloadsRequest()).workloads
    assert listed == stale
    coordinator.restart()
    unheard = workload_of(coordinator)
    assert unheard.out_of_contact
    assert not unheard.HasField("report_time")
    liar = running(stale.workload_id, "one")
    liar.out_of_contact = True
    coordinator.connect(make_hello(workloads=[liar])).welcome()
    until(lambda: not workload_of(coordinator).out_of_contact)


def test_a_watch_tells_when_the_contact_of_a_workload_changes(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    hello = make_hello(workloads=[running(workload_of(coordinator).workload_id, "one")])

    def next_mark(responses: Iterator[WatchWorkloadsResponse]) -> bool:
        return next(one.workload.out_of_contact for one in responses if one.HasField("workload"))

    responses = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(), timeout=20)
    assert not next_mark(responses)
    worker.close()
    assert next_mark(responses)
    coordinator.connect(hello).welcome()
    assert not next_mark(responses)
    coordinator.restart()
    responses = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest(), timeout=20)
    assert next_mark(responses)
    coordinator.connect(hello).welcome()
    assert not next_mark(responses)


def gpu_states(coordinator: CoordinatorProcess) -> list[SlotState.ValueType]:
    return [gpu.lease.state for gpu in coordinator.fleet.ListGpus(ListGpusRequest()).gpus]


def test_no_gpu_of_a_cordoned_worker_is_free(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    load = WorkerLoad(sequence=1, gpu_leases=worker.first.hello.gpu_leases)
    load.gpu_leases[1].state = lease_pb2.SLOT_STATE_LEASED
    load.cordon.CopyFrom(Cordon(reason="repair", cordoned_by="ann"))
    worker.up.put(ConnectRequest(worker_load=load))
    cordoned, leased = lease_pb2.SLOT_STATE_CORDONED, lease_pb2.SLOT_STATE_LEASED
    until(lambda: gpu_states(coordinator) == [cordoned, leased])
    gpu = coordinator.fleet.GetGpu(GetGpuRequest(uuid="GPU-alpha-0")).gpu
    assert gpu.lease.cordon.reason == "repair"
    assert coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker.free_gpu_count == 0
    load.sequence = 2
    load.ClearField("cordon")
    worker.up.put(ConnectRequest(worker_load=load))
    until(lambda: gpu_states(coordinator) == [lease_pb2.SLOT_STATE_FREE, leased])
    assert not coordinator.fleet.GetGpu(GetGpuRequest(uuid="GPU-alpha-0")).gpu.lease.HasField("cordon")


@pytest.mark.long
def test_a_list_of_big_messages_comes_in_pages_that_fit(coordinator: CoordinatorProcess) -> None:
    labels = {f"label-{number}": "x" * 200 for number in range(140)}
    for number in range(130):
        hello = make_hello(f"host-{number:03}", gpu_count=0, labels=labels)
        coordinator.connect(hello).welcome()
        coordinator.workers.pop().close()
    names, token = [], ""
    while True:
        request = ListWorkersRequest(page_size=1000, page_token=token)
        page = coordinator.fleet.ListWorkers(request)
        assert page.ByteSize() < 4_000_000
        names += [one.name for one in page.workers]
        if not (token := page.next_page_token):
            break
    assert names == [f"host-{number:03}" for number in range(130)]
