"""The effect of a stop or a cancellation in the present state, with the cases of the web page. Pure."""

from typing import Final

from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Workload, WorkloadState, WorkloadStatus

from leasehold_client.aio.command_watch import has_ended
from leasehold_client.errors import UsageError
from leasehold_client.messages import PARKED, operation_name, workload_state
from leasehold_client.top.fleet_model import FleetModel

_BUSY: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_PENDING,
        workload_pb2.WORKLOAD_STATE_SUSPENDING,
        workload_pb2.WORKLOAD_STATE_RESTORING,
        workload_pb2.WORKLOAD_STATE_REMAPPING,
        workload_pb2.WORKLOAD_STATE_STOPPING,
    }
)


def stop_effect(model: FleetModel, workload: Workload) -> str:
    """The effect of a stop on a workload in its present state.

    Args:
        model: The fleet, with the present state.
        workload: An earlier state of the workload.

    Raises:
        UsageError: The workload has ended.
    """
    present = model.workloads.values.get(workload.workload_id)
    if present is None:
        raise UsageError(f"{workload.name} has ended: there is nothing to stop")
    text = f"{present.name} is {workload_state(present)}. {_end_text(present.status.state)}"
    text += _fate_of_state(present.status)
    if (command := model.open_command(present.workload_id)) is not None:
        text += f" A stop is refused until its {operation_name(command)} has ended."
    return text


def _end_text(state: WorkloadState.ValueType) -> str:
    """How the worker ends a workload. Only a running or sleeping program can handle SIGTERM."""
    match state:
        case workload_pb2.WORKLOAD_STATE_RUNNING:
            return "It gets SIGTERM, and SIGKILL after 10 s. State that it has not saved is lost."
        case workload_pb2.WORKLOAD_STATE_SLEEPING:
            return "It gets SIGTERM, and SIGKILL after 10 s."
        case workload_pb2.WORKLOAD_STATE_SUSPENDED:
            return "Its processes are killed at once, since their CUDA calls block."
        case workload_pb2.WORKLOAD_STATE_CHECKPOINTED | workload_pb2.WORKLOAD_STATE_STOPPED:
            return "It ends at once, since it has no process."
        case _ if state in _BUSY:
            return (
                "Its end depends on the later state: a running process gets SIGTERM, and a state that is "
                "parked in memory or an image is lost."
            )
        case _:
            return "Its processes are killed at once. State that it has not saved is lost."


def _fate_of_state(status: WorkloadStatus) -> str:
    """The fate of the state of a parked workload. A stop deletes no application checkpoint.

    A checkpoint that was deleted before has no bytes.
    """
    if status.state not in PARKED:
        return ""
    if status.state != workload_pb2.WORKLOAD_STATE_STOPPED:
        kept = (
            " Checkpoints that its application has made stay until they expire: leasehold run "
            "--from-checkpoint ID starts from one."
        )
        return f" Its parked state is lost.{kept if status.HasField('kernel') else ''}"
    if not status.checkpoint_id or (status.HasField("disk_bytes") and not status.disk_bytes):
        return ""
    return (
        " Its checkpoint stays until it expires: leasehold run --from-checkpoint "
        f"{status.checkpoint_id} starts from it."
    )


def cancel_effect(model: FleetModel, command: Command, about: str) -> str:
    """The effect of a cancellation on a command in its present state.

    Args:
        model: The fleet, with the present state.
        command: An earlier state of the command.
        about: Names of the command's workloads, or of its worker.

    Raises:
        UsageError: The command has ended.
    """
    what = f"{operation_name(command)} of {about}"
    present = model.commands.values.get(command.command_id)
    if present is None or has_ended(present.state):
        raise UsageError(f"the {what} has ended: there is nothing to cancel")
    match present.state:
        case command_pb2.COMMAND_STATE_PENDING:
            return f"The {what} was not sent to its worker: it ends at once."
        case command_pb2.COMMAND_STATE_UNKNOWN:
            return (
                f"The worker of the {what} is out of contact. The cancellation is requested once the worker "
                "returns. The operation may have ended by then."
            )
        case _:
            return (
                f"The {what} is rolled back once its present step has ended. If it is past its point of no "
                "return, it is finished instead."
            )
