"""Checkpoints that a scripted coordinator lists, and commands on them that are done."""

from google.protobuf import duration_pb2
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import (
    checkpoint_pb2,
    command_pb2,
    command_service_pb2,
    fleet_service_pb2,
    workload_service_pb2,
)
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.command_pb2 import Command, CommandResult
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.worker_pb2 import Worker
from leasehold.v1.workload_service_pb2 import ListCheckpointsResponse

from tests.client.scripted_coordinator import ScriptedCoordinator

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
GIB = 2**30

MADE = [
    Checkpoint(
        checkpoint_id="k-2",
        kind=checkpoint_pb2.CHECKPOINT_KIND_APPLICATION,
        worker_id="w-1",
        workload_id="id-of-one",
        workload_name="one",
        create_time=Timestamp(seconds=1_700_000_000),
        size_bytes=3 * GIB,
        in_use=True,
    ),
    Checkpoint(checkpoint_id="k-1", worker_id="w-9", workload_id="id-of-two"),
    Checkpoint(checkpoint_id="k-0", kind=checkpoint_pb2.CHECKPOINT_KIND_IMAGE, worker_id="w-1"),
]


def serve(scripted: ScriptedCoordinator, *checkpoints: Checkpoint, unreachable: tuple[str, ...] = ()) -> None:
    """Lists these checkpoints, and answers every creation with a command that has succeeded."""
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
    """A command that has succeeded in two seconds."""
    made = CommandResult(duration=duration_pb2.Duration(seconds=2), **result)  # type: ignore[arg-type]
    return Command(
        command_id="c-1",
        operation=operation,
        state=command_pb2.COMMAND_STATE_SUCCEEDED,
        revision=3,
        result=made,
    )


def watched(scripted: ScriptedCoordinator, command: Command) -> None:
    """Answers a watch of a command with this one."""
    scripted.answers["WatchCommand"] = lambda request, context: iter(
        [command_service_pb2.WatchCommandResponse(command=command)]
    )
