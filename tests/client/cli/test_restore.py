"""The verb that restores, under both of its names."""

import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    fleet_service_pb2,
    operation_pb2,
    workload_service_pb2,
)
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.command_pb2 import Command, CommandResult
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.worker_pb2 import Worker
from leasehold.v1.workload_service_pb2 import ListCheckpointsResponse

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import B, ScriptedCoordinator

SUCCEEDED, FAILED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED


def serve(scripted: ScriptedCoordinator, *checkpoints: Checkpoint, unreachable: tuple[str, ...] = ()) -> None:
    """Has checkpoints listed, and every creation answered with a command that is done."""
    scripted.answers["ListCheckpoints"] = lambda request, context: ListCheckpointsResponse(
        checkpoints=checkpoints, unreachable=unreachable
    )
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse(
        workers=[Worker(worker_id="w-1", name="alpha"), Worker(worker_id="w-2", name="beta")]
    )
    scripted.answers["DeleteCheckpoints"] = lambda request, context: (
        workload_service_pb2.DeleteCheckpointsResponse(
            command=done_command(Operation(delete_checkpoints=request.operation))
        )
    )
    scripted.answers["RestoreWorkload"] = lambda request, context: (
        workload_service_pb2.RestoreWorkloadResponse(
            command=done_command(Operation(restore=request.operation))
        )
    )


def done_command(operation: Operation, **result: object) -> Command:
    made = CommandResult(duration=duration_pb2.Duration(seconds=2), **result)  # type: ignore[arg-type]
    return Command(command_id="c-1", operation=operation, state=SUCCEEDED, revision=3, result=made)


def watched(scripted: ScriptedCoordinator, command: Command) -> None:
    scripted.answers["WatchCommand"] = lambda request, context: (
        command_service_pb2.WatchCommandResponse(command=one) for one in [command]
    )


@pytest.mark.parametrize("verb", ["wake", "restore"])
def test_wake_and_restore_are_one(leasehold: CommandLine, scripted: ScriptedCoordinator, verb: str) -> None:
    serve(scripted)
    watched(scripted, done_command(Operation(restore=operation_pb2.RestoreOperation())))
    scripted.answers["Plan"] = lambda request, context: workload_service_pb2.PlanResponse(
        plan=Plan(already_there=True)
    )
    done = leasehold(verb, "one", "--to", "alpha/1", "--checkpoint", "k-1")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == "one: restore done in 2.00 s\n"
    [request] = scripted.asked(workload_service_pb2.RestoreWorkloadRequest)
    wanted = operation_pb2.RestoreOperation(gpu_uuids=[B], checkpoint_id="k-1")
    assert request.operation == wanted
    done = leasehold(verb, "one", "--to", "alpha/1", "--checkpoint", "k-1", "--dry-run")
    assert done.stdout == f"one: {verb} would have nothing to do\n"
    [planned] = scripted.asked(workload_service_pb2.PlanRequest)
    assert planned.restore == wanted
    shown = " ".join(leasehold(verb, "--help").stdout.split())
    assert "`leasehold wake` and `leasehold restore` are the same" in shown
