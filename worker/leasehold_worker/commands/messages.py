"""Results of commands as messages of the protos, within the size of a frame."""

from collections.abc import Callable
from typing import Final

from leasehold.v1 import command_pb2
from leasehold.worker.v1 import session_pb2

from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.members import MemberOutcome
from leasehold_worker.driver.messages import pair_messages
from leasehold_worker.timestamps import duration

UPDATE_LIMIT_BYTES: Final = 131_072
"""Size of the message: half a frame, as for hello."""

MESSAGE_LIMIT: Final = 1024
"""Characters of an error's message that remain if nothing else fits."""


def result_message(
    progress: Progress, duration_s: float | None, driver_version: str | None
) -> command_pb2.CommandResult:
    """The result of a command. A duration of None is unknown."""
    return command_pb2.CommandResult(
        already_there=progress.already_there,
        members=[_outcome(workload_id, outcome) for workload_id, outcome in progress.outcomes],
        applied_pairs=pair_messages(progress.applied_pairs),
        released_gpu_uuids=progress.released_gpu_uuids,
        claimed_gpu_uuids=progress.claimed_gpu_uuids,
        driver_version=driver_version,
        duration=None if duration_s is None else duration(duration_s),
        warnings=progress.warnings,
        phases=[
            command_pb2.PhaseTiming(
                phase=phase.name,
                duration=duration(phase.duration_s),
                failed=phase.failed,
                rollback=phase.rollback,
            )
            for phase in progress.phases
        ],
        policy=progress.policy,
        checkpoint_id=progress.checkpoint_id or None,
        disk_bytes=progress.disk_bytes or None,
        hold_id=progress.hold_id or None,
        preempted_workload_ids=progress.preempted_workload_ids,
    )


def _outcome(workload_id: str, outcome: MemberOutcome) -> command_pb2.MemberOutcome:
    return command_pb2.MemberOutcome(
        workload_id=workload_id,
        pid=outcome.member.identity.pid,
        start_time_ticks=outcome.member.identity.start_time_ticks,
        state_before=outcome.state_before,
        state_after=outcome.state_after,
        phases=[
            command_pb2.PhaseTiming(
                phase=str(phase.call),
                duration=duration(phase.duration_s),
                moved_bytes=phase.moved_bytes,
                failed=phase.failed,
                rollback=phase.rollback,
            )
            for phase in outcome.phases
        ],
        error=outcome.error.to_proto() if outcome.error else None,
        rolled_back=outcome.rolled_back,
    )


def fitting(update: session_pb2.CommandUpdate) -> session_pb2.CommandUpdate:
    """The update, cut to the size of a frame.

    A larger frame would end the stream, and each later one. Specs go first, since the coordinator has them;
    then the members of workloads, which hello reports; then the outcomes of the members.
    """
    fitted = session_pb2.CommandUpdate()
    fitted.CopyFrom(update)
    for trim in _TRIMS:
        if fitted.ByteSize() <= UPDATE_LIMIT_BYTES:
            break
        trim(fitted)
    return fitted


def _leave_out_specs(update: session_pb2.CommandUpdate) -> None:
    for told in update.workloads:
        told.ClearField("spec")


def _leave_out_members(update: session_pb2.CommandUpdate) -> None:
    for told in update.workloads:
        told.status.ClearField("members")


def _leave_out_member_outcomes(update: session_pb2.CommandUpdate) -> None:
    update.result.ClearField("members")
    update.result.warnings.append("the outcomes of the members are too large to report")


def _leave_out_all_but_the_outcome(update: session_pb2.CommandUpdate) -> None:
    update.ClearField("workloads")
    update.ClearField("result")
    if update.HasField("error"):
        update.error.ClearField("metadata")
        update.error.message = update.error.message[:MESSAGE_LIMIT]


_TRIMS: Final[tuple[Callable[[session_pb2.CommandUpdate], None], ...]] = (
    _leave_out_specs,
    _leave_out_members,
    _leave_out_member_outcomes,
    _leave_out_all_but_the_outcome,
)
