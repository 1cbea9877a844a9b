"""The spans of an operation that has ended, from its report: the operation, its phases, each driver call."""

import time
from typing import Final

from leasehold.v1.command_pb2 import CommandState
from leasehold.worker.v1.session_pb2 import CommandSpec

from leasehold_worker import tracing
from leasehold_worker.commands.operation_metrics import outcome_name, reason_name, verb_of
from leasehold_worker.commands.progress import OperationPhase, Progress
from leasehold_worker.driver.members import MemberOutcome, Phase
from leasehold_worker.errors import OperationError

CALLS_LIMIT: Final = 1_000
"""Driver calls of one operation that have spans."""


def export(
    command: CommandSpec,
    state: CommandState.ValueType,
    error: OperationError | None,
    progress: Progress,
    began_s: float,
) -> None:
    """Exports the spans, if there is a collector.

    Spans are made at the end: while members are locked, nothing waits for anything of traces.

    Args:
        command: The command. Its trace context has the coordinator's span.
        state: Its outcome.
        error: Its error. None: there is none.
        progress: The report.
        began_s: When the operation began, by the monotonic clock.
    """
    if not tracing.is_on():
        return
    offset_ns = time.time_ns() - time.monotonic_ns()

    def at(monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + offset_ns

    operation = tracing.begin(
        f"operation {verb_of(command)}",
        command.trace_parent,
        at(began_s),
        command=command.command_id,
        workload=command.workload_id,
        outcome=outcome_name(state),
    )
    if operation is None:
        return
    calls = [(member, call) for _, member in progress.outcomes for call in member.phases][:CALLS_LIMIT]
    for phase in progress.phases:
        span = tracing.begin(f"phase {phase.name}", operation.trace_parent, at(phase.began_s))
        if span is None:
            continue
        for member, call in calls:
            if _is_within(call, phase):
                _export_call(member, call, span.trace_parent, at(call.began_s))
        span.end("failed" if phase.failed else "", at(phase.began_s + phase.duration_s))
    operation.end(reason_name(error) if error is not None else "")


def _is_within(call: Phase, phase: OperationPhase) -> bool:
    """Whether a driver call began during a phase."""
    return 0 <= call.began_s - phase.began_s < phase.duration_s


def _export_call(member: MemberOutcome, call: Phase, parent: str, start_ns: int) -> None:
    span = tracing.begin(
        f"driver {call.call}",
        parent,
        start_ns,
        pid=member.member.identity.pid,
        moved_bytes=call.moved_bytes or 0,
        rollback=call.rollback,
    )
    if span is not None:
        span.end("failed" if call.failed else "", start_ns + int(call.duration_s * 1e9))
