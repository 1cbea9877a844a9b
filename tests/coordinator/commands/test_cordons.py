"""Commands about a worker and its GPUs, which name no workload and exclude none."""

from collections.abc import Callable

import grpc
import pytest
from leasehold.v1 import event_pb2, lease_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.fleet_service_pb2 import (
    CordonRequest,
    GetWorkerRequest,
    ResetGpuHealthRequest,
    UncordonRequest,
)
from leasehold.v1.lease_pb2 import Cordon, GpuLease
from leasehold.v1.operation_pb2 import CordonOperation, ResetGpuHealthOperation, UncordonOperation
from leasehold.v1.worker_pb2 import MachineResources
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest

from tests.coordinator.api.test_command_service import SPEC, ended, refusal, start, suspend
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.fleet.test_event_log import listed
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

Code = grpc.StatusCode
REPAIR = {"reason": "repair", "cordoned_by": "ann"}


def cordon(coordinator: CoordinatorProcess, *gpu_uuids: str, **fields: str) -> Command:
    words = REPAIR | {name: text for name, text in fields.items() if name in REPAIR}
    others = {name: text for name, text in fields.items() if name not in REPAIR}
    operation = CordonOperation(gpu_uuids=gpu_uuids, **words)
    request = CordonRequest(**{"worker": "alpha", "operation": operation} | others)  # type: ignore[arg-type]
    return coordinator.fleet.Cordon(request).command


def reset(coordinator: CoordinatorProcess, *gpu_uuids: str) -> Command:
    operation = ResetGpuHealthOperation(gpu_uuids=gpu_uuids)
    return coordinator.fleet.ResetGpuHealth(
        ResetGpuHealthRequest(worker="alpha", operation=operation)
    ).command


def uncordon(coordinator: CoordinatorProcess, *gpu_uuids: str) -> Command:
    operation = UncordonOperation(gpu_uuids=gpu_uuids)
    return coordinator.fleet.Uncordon(UncordonRequest(worker="alpha", operation=operation)).command


def test_they_reach_their_worker_and_end_as_it_says(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    created = [cordon(coordinator, "GPU-alpha-0"), uncordon(coordinator), reset(coordinator, "GPU-alpha-1")]
    assert {command.workload_id for command in created} == {""}
    assert {command.worker_id for command in created} == {"worker-alpha"}
    for command, kind in zip(created, ("cordon", "uncordon", "reset_gpu_health"), strict=True):
        assert worker.succeed(kind) == command.command_id
        assert ended(coordinator, command.command_id).operation == command.operation
    sent = worker.command("cordon").command
    assert list(sent.operation.cordon.gpu_uuids) == ["GPU-alpha-0"]
    assert sent.timeout.seconds <= 60
    found = coordinator.commands.ListCommands(ListCommandsRequest()).commands
    assert [command.command_id for command in reversed(found)] == [one.command_id for one in created]
    told = [event.message for event in listed(coordinator, worker="alpha")]
    assert "cordon of alpha/0 is SUCCEEDED" in told
    assert "uncordon of worker alpha is SUCCEEDED" in told
    assert "reset gpu health of alpha/1 is DISPATCHED" in told


def test_they_exclude_neither_each_other_nor_a_workload(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    for _ in range(3):
        cordon(coordinator)
    suspend(coordinator)
    coordinator.restart()
    back = coordinator.connect(make_hello(instance_id="instance-2"))
    back.welcome()
    cordon(coordinator)
    for _ in range(3):
        uncordon(coordinator)


def test_a_request_is_answered_with_its_command_again(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    first = cordon(coordinator, request_id="r-1")
    assert cordon(coordinator, request_id="r-1").command_id == first.command_id
    assert cordon(coordinator, request_id="r-2").command_id != first.command_id


def test_what_breaks_a_rule_is_refused(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    bad = (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    unknown = (Code.NOT_FOUND, "UNKNOWN_GPU")
    twice = (Code.INVALID_ARGUMENT, "DUPLICATE_GPU")
    cases: list[tuple[Callable[[], object], tuple[grpc.StatusCode, str]]] = [
        (lambda: cordon(coordinator, reason=""), bad),
        (lambda: cordon(coordinator, reason=" "), bad),
        (lambda: cordon(coordinator, reason="x" * 257), bad),
        (lambda: cordon(coordinator, cordoned_by=""), bad),
        (lambda: cordon(coordinator, cordoned_by="x" * 257), bad),
        (lambda: reset(coordinator), bad),
        (lambda: cordon(coordinator, "GPU-beta-0"), unknown),
        (lambda: uncordon(coordinator, "GPU-alpha-7"), unknown),
        (lambda: reset(coordinator, "GPU-alpha-0", ""), unknown),
        (lambda: cordon(coordinator, "GPU-alpha-0", "GPU-alpha-0"), twice),
        (lambda: uncordon(coordinator, "GPU-alpha-0", "GPU-alpha-0"), twice),
        (lambda: cordon(coordinator, worker="nobody"), (Code.NOT_FOUND, "UNKNOWN_WORKER")),
    ]
    for number, (call, wanted) in enumerate(cases):
        assert (number, refusal(call)) == (number, wanted)
    cordon(coordinator, reason="x" * 256)
    assert len(coordinator.commands.ListCommands(ListCommandsRequest()).commands) == 1


def test_a_worker_that_is_away_is_not_cordoned(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    coordinator.restart()
    assert refusal(lambda: cordon(coordinator))[1] == "WORKER_UNAVAILABLE"


def test_a_cordoned_worker_is_shown_and_gets_nothing(coordinator: CoordinatorProcess) -> None:
    machine = MachineResources(cpu_millicores_total=8000, cpu_millicores_free=500)
    hello = make_hello(cordon=Cordon(reason="repair", cordoned_by="ann"), resources=machine)
    coordinator.connect(hello).welcome()
    request = CreateWorkloadRequest(spec=WorkloadSpec(arguments=["program"]))
    assert refusal(lambda: coordinator.workloads.CreateWorkload(request)) == (
        Code.FAILED_PRECONDITION,
        "CORDONED",
    )
    shown = coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker
    assert shown.cordon.reason == "repair"
    assert shown.resources == machine
    told = [event for event in listed(coordinator) if event.kind == event_pb2.EVENT_KIND_CORDON]
    assert [event.message for event in told] == ["worker alpha is cordoned (repair, by ann)"]


def test_gpus_out_of_service_are_neither_free_nor_given(coordinator: CoordinatorProcess) -> None:
    hello = make_hello(gpu_count=1)
    hello.gpu_leases.append(GpuLease(gpu_uuid="GPU-alpha-1", state=lease_pb2.SLOT_STATE_FREE))
    hello.gpu_leases[1].cordon.CopyFrom(Cordon(reason="fan", cordoned_by="bob"))
    hello.gpus.add(uuid="GPU-alpha-1", slot=1)
    coordinator.connect(hello).welcome()
    shown = coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker
    assert (shown.gpu_count, shown.free_gpu_count) == (2, 1)
    assert not shown.HasField("cordon")
    named = CreateWorkloadRequest(spec=SPEC, gpu_uuids=["GPU-alpha-1"])
    assert refusal(lambda: coordinator.workloads.CreateWorkload(named))[1] == "CORDONED"
    two = WorkloadSpec(arguments=["program"], resources=Resources(gpu_count=2))
    with pytest.raises(grpc.RpcError, match="2 GPUs, 1 free, 1 cordoned"):
        coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=two))
