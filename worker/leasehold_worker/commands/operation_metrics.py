"""The metrics of an operation that has ended, from its report."""

from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.worker.v1.session_pb2 import CommandSpec

from leasehold_worker import metrics
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError

SWITCHES: Final = frozenset({"suspend", "restore", "remap"})
"""Operations that take GPUs from a running workload, or return GPUs to it."""

for _verb in SWITCHES:  # the value 0 before the first event, since rate() ignores the first value of a series
    metrics.SWITCHES.labels(_verb)
    metrics.SWITCH_GPU_SECONDS.labels(_verb)


def verb_of(command: CommandSpec) -> str:
    """The verb of a command's operation, in logs and metrics."""
    return command.operation.WhichOneof("kind") or "unknown"


def outcome_name(state: CommandState.ValueType) -> str:
    """The outcome of a command, in logs and metrics."""
    return CommandState.Name(state).removeprefix("COMMAND_STATE_")


def reason_name(error: OperationError) -> str:
    """The reason of an error, in logs and metrics."""
    return errors_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


def record(
    command: CommandSpec,
    state: CommandState.ValueType,
    error: OperationError | None,
    progress: Progress,
    duration_s: float,
) -> None:
    """Counts an operation that this process performed to its end."""
    verb = verb_of(command)
    metrics.OPERATION_SECONDS.labels(verb, outcome_name(state)).observe(duration_s)
    if error is not None:
        metrics.OPERATION_ERRORS.labels(verb, reason_name(error)).inc()
    for phase in progress.phases:
        outcome = _outcome(failed=phase.failed, rollback=phase.rollback)
        metrics.PHASE_SECONDS.labels(verb, phase.name, outcome).observe(phase.duration_s)
    moved_bytes = 0
    for _, member in progress.outcomes:
        for call in member.phases:
            outcome = _outcome(failed=call.failed, rollback=call.rollback)
            metrics.DRIVER_CALL_SECONDS.labels(call.call, outcome).observe(call.duration_s)
            if call.moved_bytes:
                metrics.DRIVER_CALL_BYTES.labels(call.call).inc(call.moved_bytes)
                moved_bytes += call.moved_bytes
    if moved_bytes:
        metrics.OPERATION_BYTES.labels(verb, "device").inc(moved_bytes)
    if progress.disk_bytes:
        metrics.OPERATION_BYTES.labels(verb, "disk").inc(progress.disk_bytes)
    if verb in SWITCHES and (gpus := _gpus(progress)):
        metrics.SWITCHES.labels(verb).inc()
        metrics.SWITCH_GPU_SECONDS.labels(verb).inc(duration_s * len(gpus))


def _outcome(*, failed: bool, rollback: bool) -> str:
    if failed:
        return "FAILED"
    return "ROLLBACK" if rollback else "SUCCEEDED"


def _gpus(progress: Progress) -> frozenset[str]:
    """The GPUs that a switch took, returned, or would have taken."""
    members = (uuid for _, outcome in progress.outcomes for uuid in outcome.member.gpu_uuids)
    return frozenset((*progress.released_gpu_uuids, *progress.claimed_gpu_uuids, *members))
