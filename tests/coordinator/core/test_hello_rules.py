"""Values that no honest client or worker sends: each is refused by name, and hurts nobody else."""

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.fleet_service_pb2 import GetGpuRequest, ListWorkersRequest
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.hook_pb2 import Hook
from leasehold.v1.operation_pb2 import Move, RemapOperation, StopOperation
from leasehold.v1.workload_pb2 import HelperTerms, Workload, WorkloadSpec, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    GetWorkloadRequest,
    ReadWorkloadOutputRequest,
    RemapWorkloadsRequest,
    StopWorkloadRequest,
)
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest, OutputChunk, WorkloadEvent

from tests.coordinator.api.test_command_service import refusal
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
LONG = "x" * 100_000
SPEC = WorkloadSpec(arguments=["program"])


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(Duration(seconds=10, nanos=-5), marks=pytest.mark.long),
        Duration(seconds=1, nanos=2_000_000_000),
    ],
    ids=str,
)
def test_a_time_that_json_cannot_say_is_refused(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, odd: Duration
) -> None:
    specs = [
        WorkloadSpec(arguments=["program"], helper=HelperTerms(grace=odd)),
        WorkloadSpec(arguments=["program"], hooks=[Hook(timeout=odd)]),
    ]
    create = coordinator.workloads.CreateWorkload
    assert refusal(lambda: create(CreateWorkloadRequest(spec=SPEC, timeout=odd))) == INVALID
    for spec in specs:
        request = CreateWorkloadRequest(spec=spec)
        assert refusal(lambda request=request: create(request)) == INVALID  # type: ignore[misc]
    stop = StopWorkloadRequest(workload="none", operation=StopOperation(grace=odd))
    assert refusal(lambda: coordinator.workloads.StopWorkload(stop)) == INVALID
    found = coordinator.commands.ListCommands(ListCommandsRequest())
    json_format.MessageToJson(found)


@pytest.mark.parametrize(
    ("service", "method", "request_message"),
    [
        ("workloads", "GetWorkload", GetWorkloadRequest(workload=LONG)),
        pytest.param(
            "workloads", "GetWorkload", GetWorkloadRequest(workload="é" * 50_000), marks=pytest.mark.long
        ),
        ("workloads", "CreateWorkload", CreateWorkloadRequest(spec=SPEC, name=LONG)),
        pytest.param(
            "workloads",
            "CreateWorkload",
            CreateWorkloadRequest(spec=SPEC, gpu_uuids=[LONG]),
            marks=pytest.mark.long,
        ),
        pytest.param("fleet", "GetGpu", GetGpuRequest(uuid=LONG), marks=pytest.mark.long),
        pytest.param("fleet", "ListWorkers", ListWorkersRequest(page_token=LONG), marks=pytest.mark.long),
    ],
)
def test_a_refusal_of_a_long_value_arrives(
    coordinator: CoordinatorProcess,
    worker: ScriptedWorker,
    service: str,
    method: str,
    request_message: Message,
) -> None:
    call = getattr(getattr(coordinator, service), method)
    code, reason = refusal(lambda: call(request_message, timeout=5))
    assert code != grpc.StatusCode.RESOURCE_EXHAUSTED, reason


def test_a_long_error_of_a_worker_arrives(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=SPEC, name="one"))
    call = coordinator.workloads.ReadWorkloadOutput(ReadWorkloadOutputRequest(workload="one"), timeout=20)
    read_id = worker.wait(lambda frame: frame.HasField("read_output")).read_output.read_id
    error = errors_pb2.Error(
        reason=errors_pb2.ERROR_REASON_INTERNAL, message="\0" * 100_000, metadata={"k" * 50_000: "v"}
    )
    worker.up.put(ConnectRequest(output_chunk=OutputChunk(read_id=read_id, error=error)))
    assert refusal(lambda: list(call)) == (grpc.StatusCode.INTERNAL, "INTERNAL")


def test_output_of_an_impossible_offset(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=SPEC, name="one"))
    call = coordinator.workloads.ReadWorkloadOutput(ReadWorkloadOutputRequest(workload="one"), timeout=20)
    read_id = worker.wait(lambda frame: frame.HasField("read_output")).read_output.read_id
    chunk = OutputChunk(read_id=read_id, offset=2**63 - 1, data=b"more")
    worker.up.put(ConnectRequest(output_chunk=chunk))
    assert refusal(lambda: list(call))[1] == "PROTOCOL_VIOLATION"


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        (2**63 - 1, "impossible generation"),
        pytest.param(-1, "status.generation: -1 is negative", marks=pytest.mark.long),
    ],
)
def test_a_generation_after_which_there_is_none(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, generation: int, said: str
) -> None:
    """The coordinator could never say that the workload has ended: not even the worker could be forgotten."""
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=generation)
    report = WorkloadEvent(workload=Workload(workload_id="w-odd", name="odd", status=status))
    worker.up.put(ConnectRequest(workload_event=report))
    goodbye = worker.wait_end().goodbye
    assert goodbye.reason == session_pb2.GOODBYE_REASON_PROTOCOL_ERROR
    assert said in goodbye.error.message
    again = coordinator.connect(make_hello())
    again.welcome()
    again.close()
    assert refusal(lambda: coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="odd")))


def test_a_remap_of_more_moves_than_a_host_has_gpus(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    moves = [Move(workload_id="one", pairs=[GpuPair(old_uuid="a", new_uuid="b")])] * 257
    request = RemapWorkloadsRequest(operation=RemapOperation(moves=moves))
    assert refusal(lambda: coordinator.workloads.RemapWorkloads(request)) == INVALID


@pytest.mark.long
def test_a_worker_that_reports_workloads_without_end(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1)
    reports = [Workload(workload_id=f"w-{number}", status=status) for number in range(2_049)]
    update = CommandUpdate(
        command_id="c-none", state=command_pb2.COMMAND_STATE_SUCCEEDED, workloads=reports[:1]
    )
    hello = make_hello("beta", workloads=reports[1:])
    full = coordinator.connect(hello)
    full.welcome()
    full.up.put(ConnectRequest(command_update=update))
    assert "2049 workloads that have not ended are too many" in full.wait_end().goodbye.error.message
    assert not worker.ended
