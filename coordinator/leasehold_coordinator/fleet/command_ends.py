"""The end of a command, as metrics and logs name it."""

from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.errors_pb2 import Error

from leasehold_coordinator import metrics


def verb_of(command: Command) -> str:
    """The verb of a command's operation."""
    return command.operation.WhichOneof("kind") or "unknown"


def outcome_name(state: CommandState.ValueType) -> str:
    """The outcome of a command, or another state."""
    return CommandState.Name(state).removeprefix("COMMAND_STATE_")


def reason_name(error: Error) -> str:
    """The reason of an error. A newer worker may send a reason that this coordinator does not know."""
    if error.reason not in errors_pb2.ErrorReason.values():
        return "OTHER"
    return errors_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


def count_end(command: Command) -> None:
    """Counts a command whose outcome is stored."""
    elapsed_s = (command.update_time.ToNanoseconds() - command.create_time.ToNanoseconds()) / 1e9
    metrics.COMMAND_SECONDS.labels(verb_of(command), outcome_name(command.state)).observe(max(0.0, elapsed_s))
