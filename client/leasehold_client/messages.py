"""Builds operation messages, and reads states, reasons and times of messages."""

import time
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

from leasehold_client.errors import UsageError
from leasehold_client.request_fields import build, value_text

Value = TypeVar("Value", bound=int)

TIMEOUT_LIMIT_S: Final = 1e9
"""Longest timeout: 31 years. gRPC's clock ends in the year 2262, and a later deadline counts as past."""

CLOCK_TOLERANCE_S: Final = 5.0
"""A moment in the near future is taken as now, since clocks of two hosts differ."""

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
    return build(
        operation_pb2.SuspendOperation,
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
    return build(
        operation_pb2.RestoreOperation,
        gpu_uuids=gpu_uuids,
        checkpoint_id=checkpoint_id,
        hold_id=hold_id,
        preempt=preempt,
    )


def remap_operation(moves: Moves, lock_timeout_s: float | None) -> operation_pb2.RemapOperation:
    """Builds a remap of several workloads. None: the worker's lock timeout."""
    messages = [
        build(
            operation_pb2.Move,
            workload_id=workload,
            pairs=[build(gpu_pb2.GpuPair, old_uuid=old, new_uuid=new) for old, new in pairs],
        )
        for workload, pairs in moves.items()
    ]
    return build(operation_pb2.RemapOperation, moves=messages, lock_timeout=duration(lock_timeout_s))


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Converts seconds to a Duration. None stays None.

    Raises:
        UsageError: As of :func:`require_timeout`.
    """
    require_timeout(seconds)
    if seconds is None:
        return None
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def require_timeout(seconds: float | None) -> None:
    """Refuses a timeout that gRPC can't take. None: no timeout.

    Raises:
        UsageError: The timeout is negative, infinite, no number, or more than 1e9 s.
    """
    if seconds is not None and not 0 <= seconds <= TIMEOUT_LIMIT_S:
        raise UsageError(
            f"{value_text(seconds)} is not a time in seconds: give 0 to {TIMEOUT_LIMIT_S:.0f} s, or None"
        )


def workload_state(workload: Workload) -> str:
    """Formats the state of a workload, with its exit status, error or missing readiness.

    If the worker is out of contact, the state is from its last report, with the time of that report if the
    coordinator has received it since its own start. A new workload may have no report.
    """
    if not workload.out_of_contact:
        return _reported_state(workload)
    if not workload.HasField("report_time"):
        seen = "not reported since the coordinator started"
    elif _is_unreported(workload):
        seen = "not reported yet"
    else:
        seen = f"as of {time_text(workload.report_time)}"
    return f"{_reported_state(workload)}({seen})"


def readiness(workload: Workload) -> str:
    """``ready``, or the last known state if the worker of a ready workload is out of contact."""
    return workload_state(workload) if workload.out_of_contact else "ready"


def _is_unreported(workload: Workload) -> bool:
    """Whether a new workload was created after the last report of its worker."""
    is_new = workload.status.state == workload_pb2.WORKLOAD_STATE_PENDING
    return is_new and workload.report_time.ToNanoseconds() < workload.create_time.ToNanoseconds()


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


def is_partial(workload: Workload) -> bool:
    """Whether most fields are unknown: a coordinator hides those of others' workloads, the spec too."""
    return not workload.HasField("spec")


def command_state(command: Command) -> str:
    """The state of a command without its prefix."""
    return enum_name(CommandState.Name, command.state, "COMMAND_STATE_")


def actor_text(command: Command) -> str:
    """The identity that requested a command, and the user for whom it did so. Empty: hidden."""
    return f"{command.actor}{f' for {command.on_behalf_of}' if command.on_behalf_of else ''}"


def operation_name(command: Command) -> str:
    """The operation of a command, such as ``suspend``."""
    return command.operation.WhichOneof("kind") or "?"


def is_about_worker(command: Command) -> bool:
    """Whether the target of a command is a worker, its GPUs or its disk, and no workload."""
    return operation_name(command) in ABOUT_WORKERS


def gpu_targets(command: Command) -> Sequence[str]:
    """UUIDs of the GPUs that are the target of a command. Empty: a workload or a whole worker is."""
    operation = command.operation
    return operation.cordon.gpu_uuids or operation.uncordon.gpu_uuids or operation.reset_gpu_health.gpu_uuids


def workload_targets(command: Command) -> Sequence[str]:
    """Ids of the workloads that are the target of a command. Empty: GPUs or a whole worker are.

    A remap may move several.
    """
    moves = command.operation.remap.moves
    return [move.workload_id for move in moves] or [command.workload_id] * bool(command.workload_id)


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


def time_text(moment: Timestamp) -> str:
    """Formats a time in UTC to the second, as RFC 3339. "-": unset; "?": outside of the calendar."""
    try:
        return f"{moment.ToJsonString()[:19]}Z" if moment.seconds else "-"
    except ValueError:
        return "?"


def age_text(moment: Timestamp, now_s: float | None = None) -> str:
    """Formats the time since a moment, such as ``5m``. A moment in the future: ``in 5m``.

    Args:
        moment: The moment. Unset: "-"; outside of the calendar: "?".
        now_s: The present, in seconds of the Unix epoch. None: the time of this host's clock.
    """
    if time_text(moment) in ("-", "?"):
        return time_text(moment)
    seconds = (time.time() if now_s is None else now_s) - moment.seconds
    return span_text(seconds) if seconds > -CLOCK_TOLERANCE_S else f"in {span_text(-seconds)}"


def ago_text(moment: Timestamp, now_s: float | None = None) -> str:
    """Formats the time since a moment, such as ``5m ago``. Otherwise as :func:`age_text`."""
    age = age_text(moment, now_s)
    return age if age in ("-", "?") or age.startswith("in ") else f"{age} ago"


def moment_text(moment: Timestamp, now_s: float | None = None) -> str:
    """Formats a time with its distance from now, such as ``2026-11-21T10:45:33Z (5m ago)``."""
    ago = ago_text(moment, now_s)
    return ago if ago in ("-", "?") else f"{time_text(moment)} ({ago})"


def span_text(seconds: float) -> str:
    """Formats a duration with its largest unit of which there are two or more."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
