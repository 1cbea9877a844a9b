"""A worker's frames are believed only for its own GPUs, workloads and commands."""

from collections.abc import Callable

import pytest
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.command_pb2 import Command, CommandResult
from leasehold.v1.command_service_pb2 import GetCommandRequest
from leasehold.v1.fleet_service_pb2 import ListGpusRequest, ListWorkersRequest
from leasehold.v1.lease_pb2 import SLOT_STATE_FREE, SLOT_STATE_LEASED, GpuLease, Lease
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    GetWorkloadRequest,
    SuspendWorkerRequest,
    SuspendWorkloadRequest,
)
from leasehold.worker.v1.session_pb2 import (
    CheckpointAnswer,
    CommandUpdate,
    ConnectRequest,
    OutputChunk,
    PlanAnswer,
    WorkerLoad,
    WorkloadEvent,
)

from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.grids import grid

EXITED = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_EXITED, generation=99)
SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
STOLEN = CommandResult(claimed_gpu_uuids=["GPU-alpha-0"], released_gpu_uuids=["GPU-alpha-1"])


def victim(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> tuple[Workload, Command]:
    """A workload that runs on alpha, and its suspend, which alpha has not answered."""
    spec = WorkloadSpec(arguments=["true"], resources=Resources(gpu_count=1))
    created = coordinator.workloads.CreateWorkload(
        CreateWorkloadRequest(name="victim", spec=spec, worker="alpha")
    )
    status = WorkloadStatus(
        state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1, lease=Lease(gpu_uuids=["GPU-alpha-0"])
    )
    worker.succeed("run", Workload(workload_id=created.workload.workload_id, status=status))
    suspend = SuspendWorkloadRequest(workload="victim", operation=SuspendOperation())
    command = coordinator.workloads.SuspendWorkload(suspend).command
    worker.command("suspend")
    return created.workload, command


def state(coordinator: CoordinatorProcess, command: Command) -> list[object]:
    """What belongs to alpha."""
    gpus = coordinator.fleet.ListGpus(ListGpusRequest(worker="alpha")).gpus
    for gpu in gpus:
        gpu.ClearField("report_time")
    return [
        coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="victim")).workload,
        coordinator.commands.GetCommand(GetCommandRequest(command_id=command.command_id)).command,
        list(gpus),
    ]


Frame = Callable[[Workload, Command], ConnectRequest]
FRAMES: dict[str, Frame] = {
    "load of a GPU": lambda workload, command: ConnectRequest(
        worker_load=WorkerLoad(
            sequence=1, gpu_leases=[GpuLease(gpu_uuid="GPU-alpha-0", state=SLOT_STATE_FREE)]
        )
    ),
    "load with a holder": lambda workload, command: ConnectRequest(
        worker_load=WorkerLoad(
            sequence=1,
            gpu_leases=[
                GpuLease(gpu_uuid="GPU-mallory-0", state=SLOT_STATE_LEASED, workload_id=workload.workload_id)
            ],
        )
    ),
    "report of a workload": lambda workload, command: ConnectRequest(
        workload_event=WorkloadEvent(workload=Workload(workload_id=workload.workload_id, status=EXITED))
    ),
    "report with an update": lambda workload, command: ConnectRequest(
        command_update=CommandUpdate(
            command_id="c-none",
            state=SUCCEEDED,
            workloads=[Workload(workload_id=workload.workload_id, status=EXITED)],
        )
    ),
    "update of a command": lambda workload, command: ConnectRequest(
        command_update=CommandUpdate(command_id=command.command_id, state=SUCCEEDED, result=STOLEN)
    ),
    "step of a command": lambda workload, command: ConnectRequest(
        command_update=CommandUpdate(
            command_id=command.command_id, state=command_pb2.COMMAND_STATE_RUNNING, phase="stolen"
        )
    ),
    "hello with a workload": lambda workload, command: ConnectRequest(
        hello=make_hello("mallory", workloads=[Workload(workload_id=workload.workload_id, status=EXITED)])
    ),
    "hello with a GPU": lambda workload, command: ConnectRequest(
        hello=make_hello("mallory", gpus=make_hello("alpha").gpus[:1])
    ),
    "hello with another id": lambda workload, command: ConnectRequest(hello=make_hello("alpha")),
}
"""Frames that end the session."""

IGNORED: dict[str, Frame] = {
    "outcome of an unknown command": lambda workload, command: ConnectRequest(
        command_update=CommandUpdate(command_id="c-none", state=SUCCEEDED, result=STOLEN)
    ),
    "output": lambda workload, command: ConnectRequest(
        output_chunk=OutputChunk(read_id="read-1", data=b"stolen", end=True)
    ),
    "plan": lambda workload, command: ConnectRequest(plan_answer=PlanAnswer(plan_id="plan-1")),
    "checkpoints": lambda workload, command: ConnectRequest(
        checkpoint_answer=CheckpointAnswer(query_id="q-1", checkpoints=[Checkpoint(checkpoint_id="k-1")])
    ),
}
"""Frames that answer nothing, as answers that are late."""


@pytest.mark.parametrize(
    "name", grid([*FRAMES, *IGNORED], "hello with a GPU", "hello with another id", "output")
)
def test_a_frame_changes_nothing_of_another_worker(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, name: str
) -> None:
    workload, command = victim(coordinator, worker)
    mallory = coordinator.connect(make_hello("mallory"))
    mallory.welcome()
    before = state(coordinator, command)
    mallory.up.put({**FRAMES, **IGNORED}[name](workload, command))
    if name in FRAMES:
        end = mallory.wait_end()
        assert end.goodbye.HasField("error"), end
    else:
        mallory.report()
        workers = ListWorkersRequest(filter="name = mallory AND state = CONNECTED")
        assert coordinator.fleet.ListWorkers(workers).workers
    assert state(coordinator, command) == before
    assert not worker.ended


def test_a_hello_names_no_workload_and_no_lease_of_another_worker(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    workload, command = victim(coordinator, worker)
    before = state(coordinator, command)
    held = GpuLease(gpu_uuid="GPU-mallory-0", state=SLOT_STATE_LEASED, workload_id=workload.workload_id)
    others = GpuLease(gpu_uuid="GPU-alpha-0", state=SLOT_STATE_FREE)
    for fields in (
        {"workloads": [Workload(workload_id=workload.workload_id, status=EXITED)]},
        {"gpu_leases": [held]},
        {"gpu_leases": [others]},
    ):
        refused = coordinator.connect(make_hello("mallory", **fields))
        assert refused.wait_end().goodbye.error.message.endswith("not a copy")
    in_flight = make_hello("mallory", commands_in_flight=[command.command_id])
    coordinator.connect(in_flight).welcome()
    assert state(coordinator, command) == before


def test_the_workloads_of_a_worker_are_its_own(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    """A suspend of all workloads of a worker reaches no workload of another."""
    spec = WorkloadSpec(arguments=["true"], resources=Resources(gpu_count=1))
    mallory = coordinator.connect(make_hello("mallory"))
    mallory.welcome()
    leases = mallory.first.hello.gpu_leases
    leases[0].state, leases[0].workload_id = SLOT_STATE_LEASED, "w-later"
    mallory.report()
    later = Workload(
        workload_id="w-later",
        spec=spec,
        origin=workload_pb2.WORKLOAD_ORIGIN_EXEC,
        status=WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1),
    )
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=later)))
    while not coordinator.fleet.ListGpus(ListGpusRequest(filter="workload = w-later")).gpus:
        pass
    done = coordinator.workloads.SuspendWorker(
        SuspendWorkerRequest(worker="mallory", operation=SuspendOperation())
    )
    assert not done.commands
    assert not done.refusals
