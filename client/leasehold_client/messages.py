"""Builds operation messages, and reads states, reasons and times of messages."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

from google.protobuf import duration_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import gpu_pb2, operation_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import Workload

Value = TypeVar("Value", bound=int)

Moves: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""Pairs of (old UUID, new UUID) by workload id or name."""

PARKED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_SLEEPING,
        workload_pb2.WORKLOAD_STATE_SUSPENDED,
        workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
        workload_pb2.WORKLOAD_STATE_STOPPED,
    }
)
"""States of workloads that can be restored."""

ABOUT_WORKERS: Final = frozenset(
    {"cordon", "uncordon", "reset_gpu_health", "delete_checkpoints", "release_hold"}
)
"""Operations on a worker, its GPUs or its disk."""


def suspend_operation(
    lock_timeout_s: float | None,
    policy: EvictionPolicy | None = None,
    *,
    force: bool = False,
    hold_for_s: float | None = None,
    held_by: str = "",
) -> operation_pb2.SuspendOperation:
    """Builds a suspend. None: the worker's lock timeout, the policy of the workload's spec, and no hold."""
    return operation_pb2.SuspendOperation(
        policy=policy,
        lock_timeout=duration(lock_timeout_s),
        force=force,
        hold_for=duration(hold_for_s),
        held_by=held_by,
    )


def restore_operation(
    gpu_uuids: Sequence[str], checkpoint_id: str, hold_id: str = "", preempt: Sequence[str] = ()
) -> operation_pb2.RestoreOperation:
    """Builds a restore. Empty: the worker chooses the GPUs and the checkpoint, and takes no hold."""
    return operation_pb2.RestoreOperation(
        gpu_uuids=gpu_uuids, checkpoint_id=checkpoint_id, hold_id=hold_id, preempt=preempt
    )


def remap_operation(moves: Moves, lock_timeout_s: float | None) -> operation_pb2.RemapOperation:
    """Builds a remap of several workloads. None: the worker's lock timeout."""
    messages = [
        operation_pb2.Move(
            workload_id=workload,
            pairs=[gpu_pb2.GpuPair(old_uuid=old, new_uuid=new) for old, new in pairs],
        )
        for workload, pairs in moves.items()
    ]
    return operation_pb2.RemapOperation(moves=messages, lock_timeout=duration(lock_timeout_s))


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Converts seconds to a Duration. None stays None."""
    if seconds is None:
        return None
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def workload_state(workload: Workload) -> str:
    """Formats the state of a workload, with its exit status, error or missing readiness.

    If the worker is out of contact, the state is from its last report, with the time of that report.
    """
    if not workload.out_of_contact:
        return _reported_state(workload)
    seen = (
        f"as of {time_text(workload.report_time)}" if workload.HasField("report_time") else "never reported"
    )
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
    """The state of a command without its prefix."""
    return enum_name(CommandState.Name, command.state, "COMMAND_STATE_")


def operation_name(command: Command) -> str:
    """The operation of a command, such as ``suspend``."""
    return command.operation.WhichOneof("kind") or "?"


def is_about_worker(command: Command) -> bool:
    """Whether the target of a command is a worker, its GPUs or its disk, and no workload."""
    return operation_name(command) in ABOUT_WORKERS


def reason_name(reason: ErrorReason.ValueType) -> str:
    """A reason without its prefix."""
    return enum_name(ErrorReason.Name, reason, "ERROR_REASON_")


def enum_name(name_of: Callable[[Value], str], value: Value, prefix: str) -> str:
    """An enum value without its prefix. A value of a newer coordinator is its number."""
    try:
        return name_of(value).removeprefix(prefix)
    except ValueError:
        return str(value)


def duration_s(duration: Duration) -> float:
    """Converts a Duration to seconds, also outside of timedelta's range."""
    return duration.ToNanoseconds() / 1e9


def seconds_text(time_s: float) -> str:
    """Formats a time, in seconds of the Unix epoch, like :func:`time_text`."""
    return time_text(Timestamp(seconds=int(time_s)))


def time_text(moment: Timestamp) -> str:
    """Formats a time in UTC to the second. "-": unset; "?": outside of the calendar."""
    try:
        return moment.ToJsonString()[:19] if moment.seconds else "-"
    except ValueError:
        return "?"
