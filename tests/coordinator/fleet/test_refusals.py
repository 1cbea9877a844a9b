"""What clients may not ask: each refusal has its code and reason, and changes nothing."""

import base64
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import lease_pb2, workload_pb2
from leasehold.v1.command_service_pb2 import CancelCommandRequest, ListCommandsRequest, WatchCommandRequest
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.fleet_service_pb2 import (
    GetGpuRequest,
    GetWorkerRequest,
    ListGpusRequest,
    ListWorkersRequest,
    WatchFleetRequest,
)
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.operation_pb2 import Move, RemapOperation, RestoreOperation
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    ListWorkloadsRequest,
    ReadWorkloadOutputRequest,
    RemapWorkloadsRequest,
    RestoreWorkloadRequest,
    StopWorkloadRequest,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkerLoad
from leasehold_coordinator.core.workload_states import state_name
from leasehold_coordinator.errors import reason_name

from tests.coordinator.api.test_command_service import SPEC, refusal, start, suspend
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until

Code = grpc.StatusCode
Case = tuple[Callable[[], object], grpc.StatusCode, str]
LONG = Duration(seconds=10**18)


@pytest.fixture
def running(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> CoordinatorProcess:
    """A coordinator with the workload one, which runs."""
    start(coordinator, worker)
    return coordinator


def refused(coordinator: CoordinatorProcess, cases: list[Case]) -> None:
    """Each is refused as it should be, and afterwards all is as before."""
    before = everything(coordinator)
    for number, (call, code, reason) in enumerate(cases):
        assert (number, *refusal(call)) == (number, code, reason)
    assert everything(coordinator) == before


def everything(coordinator: CoordinatorProcess) -> list[object]:
    return [
        list(coordinator.commands.ListCommands(ListCommandsRequest()).commands),
        list(coordinator.workloads.ListWorkloads(ListWorkloadsRequest(include_ended=True)).workloads),
    ]


def test_bad_requests_for_a_new_workload(running: CoordinatorProcess) -> None:
    def create(**fields: object) -> Callable[[], object]:
        values = {"name": "two", "spec": SPEC} | fields
        request = CreateWorkloadRequest(**values)  # type: ignore[arg-type]  # fields by name
        return lambda: running.workloads.CreateWorkload(request)

    def needing(**fields: object) -> WorkloadSpec:
        resources = Resources(gpu_count=1, **fields)  # type: ignore[arg-type]  # fields by name
        return WorkloadSpec(arguments=["program"], resources=resources)

    two = WorkloadSpec(arguments=["program"], resources=Resources(gpu_count=2))
    bad = (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    refused(
        running,
        [
            (create(timeout=LONG), *bad),
            (create(timeout=Duration(seconds=-1)), *bad),
            (create(timeout=Duration(seconds=8 * 86_400)), *bad),
            (create(timeout=Duration(), validate_only=True), *bad),
            (create(name="ends with space "), *bad),
            (create(name="x" * 64), *bad),
            (create(name="naïve"), *bad),
            (create(name="line\n"), *bad),
            (create(spec=WorkloadSpec(arguments=[""])), *bad),
            (create(request_id="r" * 200_000), *bad),
            (create(gpu_uuids=["GPU-alpha-0"] * 257), *bad),
            (create(spec=needing(gpu_uuids=["GPU-alpha-0"] * 257)), *bad),
            (create(spec=needing(acceptable_gpu_units=[7] * 257)), *bad),
            (create(gpu_uuids=["GPU-alpha-0"], spec=two), *bad),
            (create(worker="beta", validate_only=True), Code.NOT_FOUND, "UNKNOWN_WORKER"),
            (create(worker="alpha", gpu_uuids=["GPU-beta-0"]), Code.NOT_FOUND, "UNKNOWN_GPU"),
        ],
    )


def test_bad_requests_for_a_workload_that_exists(running: CoordinatorProcess) -> None:
    calls = running.workloads
    bad = (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    wrong = (Code.FAILED_PRECONDITION, "WRONG_STATE")
    many = RemapOperation(
        moves=[Move(workload_id="one", pairs=[GpuPair(old_uuid="x" * 100, new_uuid="y" * 100)] * 1000)]
    )

    def restore(**fields: object) -> object:
        operation = RestoreOperation(**fields)  # type: ignore[arg-type]  # fields by name
        return calls.RestoreWorkload(RestoreWorkloadRequest(workload="one", operation=operation))

    elsewhere = RestoreOperation(pairs=[GpuPair(old_uuid="a", new_uuid="b")])
    refused(
        running,
        [
            (lambda: suspend(running, timeout=LONG), *bad),
            (lambda: suspend(running, timeout=Duration(), validate_only=True), *bad),
            (lambda: suspend(running, timeout=Duration(seconds=-5)), *bad),
            (lambda: suspend(running, ""), Code.NOT_FOUND, "UNKNOWN_WORKLOAD"),
            (lambda: calls.RemapWorkloads(RemapWorkloadsRequest(operation=many)), *bad),
            (lambda: restore(gpu_uuids=["GPU-alpha-0"] * 257), *bad),
            (lambda: restore(pairs=[GpuPair(old_uuid="a", new_uuid="b")] * 257), *bad),
            (
                lambda: calls.RestoreWorkload(RestoreWorkloadRequest(workload="one", operation=elsewhere)),
                *wrong,
            ),
            (
                lambda: calls.StopWorkload(StopWorkloadRequest(workload="one", expected_generation=0)),
                Code.ABORTED,
                "GENERATION_MISMATCH",
            ),
            (
                lambda: list(calls.ReadWorkloadOutput(ReadWorkloadOutputRequest(workload="two"))),
                Code.NOT_FOUND,
                "UNKNOWN_WORKLOAD",
            ),
        ],
    )


def test_bad_reads(running: CoordinatorProcess) -> None:
    far = base64.urlsafe_b64encode(str(10**25).encode()).decode()
    unknown_command = (Code.NOT_FOUND, "UNKNOWN_COMMAND")
    fleet, commands = running.fleet, running.commands
    refused(
        running,
        [
            (lambda: fleet.GetGpu(GetGpuRequest(uuid="GPU-x")), Code.NOT_FOUND, "UNKNOWN_GPU"),
            (lambda: fleet.GetWorker(GetWorkerRequest(worker="x")), Code.NOT_FOUND, "UNKNOWN_WORKER"),
            (lambda: fleet.ListGpus(ListGpusRequest(worker="x")), Code.NOT_FOUND, "UNKNOWN_WORKER"),
            (lambda: commands.CancelCommand(CancelCommandRequest(command_id="x")), *unknown_command),
            (lambda: list(commands.WatchCommand(WatchCommandRequest(command_id="x"))), *unknown_command),
            (
                lambda: commands.ListCommands(ListCommandsRequest(workload="x")),
                Code.NOT_FOUND,
                "UNKNOWN_WORKLOAD",
            ),
            (
                lambda: commands.ListCommands(ListCommandsRequest(page_token=far)),
                Code.INVALID_ARGUMENT,
                "INVALID_TOKEN",
            ),
            (
                lambda: fleet.ListWorkers(ListWorkersRequest(page_size=-1)),
                Code.INVALID_ARGUMENT,
                "INVALID_ARGUMENT",
            ),
            (
                lambda: list(fleet.WatchFleet(WatchFleetRequest(resume_token="0.9"))),
                Code.INVALID_ARGUMENT,
                "INVALID_TOKEN",
            ),
        ],
    )


def test_a_timeout_that_is_refused_does_not_end_the_coordinator(running: CoordinatorProcess) -> None:
    assert refusal(lambda: suspend(running, timeout=LONG))[1] == "INVALID_ARGUMENT"
    suspend(running)
    assert running.process.poll() is None


def test_without_any_worker(coordinator: CoordinatorProcess) -> None:
    create = CreateWorkloadRequest(spec=SPEC)
    refused(
        coordinator,
        [
            (
                lambda: coordinator.workloads.CreateWorkload(create),
                Code.UNAVAILABLE,
                "WORKER_UNAVAILABLE",
            )
        ],
    )


def test_gpus_that_a_command_names_are_taken_from_then_on(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    calls = coordinator.workloads
    named = CreateWorkloadRequest(spec=WorkloadSpec(arguments=["program"]), gpu_uuids=["GPU-alpha-0"])
    calls.CreateWorkload(named)
    taken = (Code.RESOURCE_EXHAUSTED, "NO_FREE_GPU")
    assert refusal(lambda: calls.CreateWorkload(named)) == taken
    calls.CreateWorkload(CreateWorkloadRequest(spec=SPEC))
    other = CreateWorkloadRequest(spec=WorkloadSpec(arguments=["program"]), gpu_uuids=["GPU-alpha-1"])
    assert refusal(lambda: calls.CreateWorkload(other)) == taken


@pytest.mark.long
def test_gpus_that_a_starting_workload_holds_already_are_not_counted_twice(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    calls = coordinator.workloads
    first = calls.CreateWorkload(CreateWorkloadRequest(spec=SPEC)).workload
    pool = [
        GpuLease(
            gpu_uuid="GPU-alpha-0", state=lease_pb2.SLOT_STATE_LEASED, workload_id=first.workload_id, slot=0
        ),
        GpuLease(gpu_uuid="GPU-alpha-1", state=lease_pb2.SLOT_STATE_FREE, slot=1),
    ]
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=pool)))
    known = GetWorkerRequest(worker="alpha")
    until(lambda: coordinator.fleet.GetWorker(known).worker.free_gpu_count == 1)
    assert calls.CreateWorkload(CreateWorkloadRequest(spec=SPEC)).workload.worker_id == "worker-alpha"
    assert refusal(lambda: calls.CreateWorkload(CreateWorkloadRequest(spec=SPEC)))[1] == "NO_FREE_GPU"


def test_the_worker_with_the_most_free_gpus_is_chosen(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    coordinator.connect(make_hello("beta", gpu_count=4)).welcome()
    chosen = [
        coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=SPEC)).workload.worker_id
        for _ in range(3)
    ]
    assert chosen == ["worker-beta", "worker-beta", "worker-alpha"]


def test_every_reason_has_a_name_also_one_of_a_newer_worker() -> None:
    for reason in ErrorReason.values():
        assert f"ERROR_REASON_{reason_name(reason)}" == ErrorReason.Name(reason)
    assert reason_name(9999) == "9999"  # type: ignore[arg-type]  # what a newer release may add
    assert state_name(workload_pb2.WORKLOAD_STATE_RUNNING) == "RUNNING"
    assert state_name(9999) == "9999"  # type: ignore[arg-type]  # as above
