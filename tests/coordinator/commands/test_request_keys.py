"""A request_id belongs to one request: its method and its content."""

from collections.abc import Callable

import grpc
import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import workload_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.fleet_service_pb2 import CordonRequest, UncordonRequest
from leasehold.v1.operation_pb2 import AdoptOperation, CordonOperation
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    CreateWorkloadRequest,
    ReleaseWorkloadRequest,
    StopWorkloadRequest,
    SuspendWorkloadRequest,
)
from leasehold_coordinator.access.secret_vault import SecretVault
from leasehold_coordinator.commands.request_keys import RequestKey

from tests.coordinator.api.test_command_service import SPEC, SUCCEEDED, ended, refusal, reported, start
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker

REUSED = (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED")


def seconds(number: int) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=number)


def ids(coordinator: CoordinatorProcess) -> list[str]:
    found = coordinator.commands.ListCommands(ListCommandsRequest()).commands
    return [command.command_id for command in found]


@pytest.mark.parametrize("is_over", [False, True], ids=["open", "ended"])
def test_no_other_request_is_answered_with_its_command(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, is_over: bool
) -> None:
    one = start(coordinator, worker)
    request = CreateWorkloadRequest(request_id="r-1", name="two", spec=SPEC)
    created = coordinator.workloads.CreateWorkload(request)
    if is_over:
        command_id = created.command.command_id
        frame = worker.wait(lambda frame: frame.command.command.command_id == command_id).command
        running = reported(created.workload, workload_pb2.WORKLOAD_STATE_RUNNING, 1)
        worker.update(frame.command.command_id, SUCCEEDED, running)
        ended(coordinator, command_id)
    before = ids(coordinator)
    others: list[Callable[[], object]] = [
        lambda: coordinator.workloads.StopWorkload(StopWorkloadRequest(request_id="r-1", workload="two")),
        lambda: coordinator.workloads.AdoptProcess(
            AdoptProcessRequest(request_id="r-1", worker="alpha", operation=AdoptOperation(pid=1))
        ),
        lambda: coordinator.workloads.ReleaseWorkload(
            ReleaseWorkloadRequest(request_id="r-1", workload=one.workload_id)
        ),
        lambda: coordinator.fleet.Cordon(
            CordonRequest(
                request_id="r-1", worker="alpha", operation=CordonOperation(reason="a", cordoned_by="b")
            )
        ),
        lambda: coordinator.fleet.Uncordon(UncordonRequest(request_id="r-1", worker="alpha")),
        lambda: coordinator.workloads.CreateWorkload(
            CreateWorkloadRequest(request_id="r-1", name="two", spec=SPEC, timeout=seconds(5))
        ),
        lambda: coordinator.workloads.CreateWorkload(
            CreateWorkloadRequest(request_id="r-1", name="three", spec=SPEC)
        ),
    ]
    for other in others:
        assert refusal(other) == REUSED
    assert ids(coordinator) == before
    assert coordinator.workloads.CreateWorkload(request).command.command_id == created.command.command_id


def test_a_request_keeps_its_id_over_a_restart(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    request = SuspendWorkloadRequest(request_id="r-1", workload="one", timeout=seconds(300))
    command_id = coordinator.workloads.SuspendWorkload(request).command.command_id
    coordinator.restart()
    other = SuspendWorkloadRequest(request_id="r-1", workload="one", timeout=seconds(301))
    assert refusal(lambda: coordinator.workloads.SuspendWorkload(other)) == REUSED
    assert coordinator.workloads.SuspendWorkload(request).command.command_id == command_id


def test_the_order_of_a_map_is_not_content() -> None:
    names = [f"VARIABLE_{number}" for number in range(50)]
    first, second = CreateWorkloadRequest(request_id="r"), CreateWorkloadRequest(request_id="r")
    for name in names:
        first.spec.environment[name] = "x"
    for name in reversed(names):
        second.spec.environment[name] = "x"
    vault = SecretVault(bytes(32), bytes(32))
    assert RequestKey.of(vault, "r", first) == RequestKey.of(vault, "r", second)
    other = SecretVault(bytes(32), bytes([1] * 32))
    assert RequestKey.of(vault, "r", first) != RequestKey.of(other, "r", first)
