"""Messages of the API: how operations are made, and how states and times read."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

from google.protobuf import duration_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, gpu_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.workload_pb2 import EvictionPolicy, Workload

Value = TypeVar("Value", bound=int)

Moves: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""Workloads by id or name, each with its pairs of (old UUID, new UUID)."""

PARKED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_SLEEPING,
        workload_pb2.WORKLOAD_STATE_SUSPENDED,
        workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
        workload_pb2.WORKLOAD_STATE_STOPPED,
    }
)
"""States of workloads that wait to be woken."""


def suspension(
    lock_timeout_s: float | None, policy: EvictionPolicy | None = None, *, force: bool = False
) -> command_pb2.SuspendOperation:
    """A suspension. None: the worker's lock timeout, and the policy of the workload's spec."""
    return command_pb2.SuspendOperation(policy=policy, lock_timeout=duration(lock_timeout_s), force=force)


def waking(gpu_uuids: Sequence[str], checkpoint_id: str) -> command_pb2.RestoreOperation:
    """A restore. Empty: the GPUs and the checkpoint that the worker chooses."""
    return command_pb2.RestoreOperation(gpu_uuids=gpu_uuids, checkpoint_id=checkpoint_id)


def remapping(moves: Moves, lock_timeout_s: float | None) -> command_pb2.RemapOperation:
    """A remap of all these workloads. None: the worker's lock timeout."""
    messages = [
        command_pb2.Move(
            workload_id=workload,
            pairs=[gpu_pb2.GpuPair(old_uuid=old, new_uuid=new) for old, new in pairs],
        )
        for workload, pairs in moves.items()
    ]
    return command_pb2.RemapOperation(moves=messages, lock_timeout=duration(lock_timeout_s))


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """A span of time; None stays absent."""
    if seconds is None:
        return None
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def workload_state(workload: Workload) -> str:
    """The state of a workload, with how it ended, what is wrong with it, or that a helper waits for GPUs.

    Where its worker is out of contact, the state is that of the worker's last report.
    """
    if not workload.out_of_contact:
        return _reported_state(workload)
    seen = f"as of {time_text(workload.report_time)}" if workload.HasField("report_time") else "not heard of"
    return f"{_reported_state(workload)}({seen})"


def _reported_state(workload: Workload) -> str:
    status = workload.status
    text = enum_name(workload_pb2.WorkloadState.Name, status.state, "WORKLOAD_STATE_")
    if status.state == workload_pb2.WORKLOAD_STATE_RUNNING and status.HasField("error"):
        return f"{text}({reason_name(status.error.reason)})"
    if status.state == workload_pb2.WORKLOAD_STATE_RUNNING and not status.HasField("ready_time"):
        return f"{text}(not ready)"
    if status.yielded and status.state in PARKED:
        return f"{text}(yielded)"
    match status.exit.WhichOneof("cause"):
        case "code":
            return f"{text}({status.exit.code})"
        case "signal_number":
            return f"{text}(signal {status.exit.signal_number})"
        case None:
            return text


def command_state(command: Command) -> str:
    """The state of a command."""
    return enum_name(CommandState.Name, command.state, "COMMAND_STATE_")


def operation_name(command: Command) -> str:
    """What a command does."""
    return command.operation.WhichOneof("kind") or "?"


def is_about_worker(command: Command) -> bool:
    """Whether a command is about a worker, its GPUs or its disk, and about no workload."""
    return operation_name(command) in ("cordon", "uncordon", "reset_gpu_health", "delete_checkpoints")


def reason_name(reason: ErrorReason.ValueType) -> str:
    """A reason without its prefix."""
    return enum_name(ErrorReason.Name, reason, "ERROR_REASON_")


def enum_name(name_of: Callable[[Value], str], value: Value, prefix: str) -> str:
    """An enum's value without its prefix; the number of one that only a newer coordinator knows."""
    try:
        return name_of(value).removeprefix(prefix)
    except ValueError:
        return str(value)


def duration_s(duration: Duration) -> float:
    """A span of time in seconds, whatever a peer sent."""
    return duration.ToNanoseconds() / 1e9


def time_text(moment: Timestamp) -> str:
    """A moment for people, in UTC. "?": no calendar has it."""
    try:
        return moment.ToJsonString()[:19] if moment.seconds else "-"
    except ValueError:
        return "?"
