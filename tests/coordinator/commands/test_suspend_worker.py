"""The suspend of all workloads of a worker, as one call."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, errors_pb2, lease_pb2, workload_pb2
from leasehold.v1.workload_service_pb2 import StopWorkloadRequest, SuspendWorkerRequest, SuspendWorkerResponse
from leasehold_coordinator.core.command_ledger import SENT_LIMIT

from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED


def suspend_worker(coordinator: CoordinatorProcess) -> SuspendWorkerResponse:
    return coordinator.workloads.SuspendWorker(SuspendWorkerRequest(worker="alpha"))


@pytest.mark.long
def test_all_workloads_of_a_worker_are_suspended_by_one_call_in_order(
    coordinator: CoordinatorProcess,
) -> None:
    count = 200
    workloads = [
        workload_pb2.Workload(
            workload_id=f"w-{number}",
            name=f"n-{number}",
            worker_id="worker-alpha",
            status=workload_pb2.WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1),
            create_time=Timestamp(seconds=10_000 - number),
        )
        for number in range(count)
    ]
    workloads[7].status.state = workload_pb2.WORKLOAD_STATE_WEDGED
    hello = make_hello(gpu_count=count, workloads=workloads)
    for lease, workload in zip(hello.gpu_leases[:-1], workloads[1:], strict=True):  # the first holds none
        lease.state, lease.workload_id = lease_pb2.SLOT_STATE_LEASED, workload.workload_id
    worker = coordinator.connect(hello)
    worker.welcome()
    answer = suspend_worker(coordinator)
    assert [(refusal.workload_name, refusal.error.reason) for refusal in answer.refusals] == [
        ("n-7", errors_pb2.ERROR_REASON_WRONG_STATE)
    ]
    asked = [command.workload_id for command in answer.commands]
    assert asked == [workload.workload_id for workload in reversed(workloads[1:]) if workload.name != "n-7"]
    again = suspend_worker(coordinator)
    assert [command.command_id for command in again.commands] == [
        command.command_id for command in answer.commands
    ]
    stopped = StopWorkloadRequest(workload="n-0")  # of the same host, so behind: nothing goes before its turn
    last = coordinator.workloads.StopWorkload(stopped).command.command_id
    carried_out: list[str] = []
    while len(carried_out) < count - 1:
        wanted = len(carried_out)
        worker.wait(lambda _: len(sent(worker)) > len(carried_out))
        for command_id in sent(worker)[wanted:]:
            assert len(sent(worker)) - len(carried_out) <= SENT_LIMIT
            worker.update(command_id, SUCCEEDED)
            carried_out.append(command_id)
    assert carried_out == [*(command.command_id for command in answer.commands), last]


def sent(worker: ScriptedWorker) -> list[str]:
    """The commands that came, in order, each once."""
    frames = [
        frame.command for frame in worker.frames if frame.HasField("command") and not frame.command.cancel
    ]
    return list(dict.fromkeys(frame.command.command_id for frame in frames))
