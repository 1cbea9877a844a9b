"""Outcomes of commands: what a command did, or why it failed."""

from collections.abc import Collection, Iterable, Mapping

from leasehold.v1.command_pb2 import Command, CommandResult, PhaseTiming
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import MemberState

from leasehold_client.arguments.gpu_names import gpu_places, with_places
from leasehold_client.arguments.policies import policy_text
from leasehold_client.byte_sizes import size_text
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import one_line
from leasehold_client.messages import (
    command_state,
    duration_s,
    enum_name,
    is_about_worker,
    operation_name,
    reason_name,
)


def echo_outcome(
    command: Command, workload_name: str, gpus: Iterable[FleetGpu], preempted: Iterable[str] = ()
) -> None:
    """Prints the effects of a command that succeeded.

    Args:
        command: The command.
        workload_name: The name of its workload or worker.
        gpus: GPUs of the fleet, for their short names.
        preempted: Names of the workloads that it suspended first.
    """
    places = gpu_places(gpus)
    result = command.result
    what = "done"
    if result.HasField("duration") and not is_about_worker(command):
        what = f"done in {duration_s(result.duration):.2f} s"
    if result.already_there:
        what = "nothing to do"
    echo(f"{workload_name}: {operation_name(command)} {what}")
    if timing := timing_line(result):
        echo(f"  {timing}")
    if result.HasField("policy"):
        echo(f"  policy {policy_text(result.policy)}")
    if result.HasField("checkpoint_id"):
        echo(f"  checkpoint {result.checkpoint_id}")
    if result.HasField("disk_bytes"):
        echo(f"  {size_text(result.disk_bytes)} on disk")
    if names := ", ".join(preempted):
        echo(f"  suspended {names}")
    if result.HasField("hold_id"):
        hold_s = duration_s(command.operation.suspend.hold_for)
        echo(f"  hold {result.hold_id} for {hold_s:g} s: take it by run --hold or restore --hold")
    for label, uuids in (("released", result.released_gpu_uuids), ("claimed", result.claimed_gpu_uuids)):
        if uuids:
            echo(f"  {label} {', '.join(places.get(uuid, uuid) for uuid in uuids)}")
    for line in pair_lines(result.applied_pairs, result.claimed_gpu_uuids, places):
        echo(f"  {line}")
    for member in result.members:
        timings = ", ".join(_phase(phase) for phase in member.phases)
        echo(f"  pid {member.pid}: {timings or 'nothing to do'}")
    for warning in result.warnings:
        echo(f"  warning: {with_places(warning, places)}")


def _phase(phase: PhaseTiming) -> str:
    seconds = duration_s(phase.duration)
    moved = f" ({size_text(phase.moved_bytes)})" if phase.HasField("moved_bytes") else ""
    return f"{phase.phase} {seconds:.2f} s{moved}"


def timing_line(result: CommandResult) -> str:
    """Formats the duration of each phase of an operation, with the memory that was moved and its rate."""
    moved: dict[str, int] = {}
    for member in result.members:
        for phase in member.phases:
            if not phase.rollback:
                moved[phase.phase] = moved.get(phase.phase, 0) + phase.moved_bytes
    return ", ".join(_whole_phase(phase, moved.get(phase.phase, 0)) for phase in result.phases)


def _whole_phase(phase: PhaseTiming, moved_by_members: int) -> str:
    seconds = duration_s(phase.duration)
    undoing = "undoing " if phase.rollback and phase.phase != "rollback" else ""
    text = f"{undoing}{phase.phase} {'FAILED after ' if phase.failed else ''}{seconds_text(seconds)}"
    moved_bytes = phase.moved_bytes or (0 if phase.rollback else moved_by_members)
    if not moved_bytes or not seconds:
        return text
    return f"{text} ({size_text(moved_bytes)}, {size_text(int(moved_bytes / seconds))}/s)"


def failure_lines(command: Command) -> list[str]:
    """Formats the error of a command, the state of each member, and the warnings."""
    return [
        f"{operation_name(command)} {command_state(command)}: {failure_text(command)}",
        *member_lines(command),
        *warning_lines(command),
    ]


def failure_text(command: Command) -> str:
    """The message of a failure with its reason. The message, or both, are hidden of others' commands."""
    if not command.HasField("error"):
        return "?"
    message, reason = one_line(command.error.message), reason_name(command.error.reason)
    return f"{message} ({reason})" if message else reason


def warning_lines(command: Command) -> list[str]:
    """Formats the warnings of a command."""
    return [f"  warning: {one_line(warning)}" for warning in command.result.warnings]


def member_lines(command: Command) -> list[str]:
    """Formats the state of each member of a failed command. The command's own error is not repeated."""
    lines = []
    for member in command.result.members:
        before, after = (
            enum_name(MemberState.Name, state, "MEMBER_STATE_")
            for state in (member.state_before, member.state_after)
        )
        line = f"  pid {member.pid}: {before} -> {after}"
        if member.HasField("rolled_back"):
            line += ", rolled back" if member.rolled_back else ", NOT rolled back"
        if member.HasField("error") and member.error.message != command.error.message:
            line += f": {member.error.message}"
        lines.append(line)
    return lines


def pair_lines(pairs: Iterable[GpuPair], taken: Collection[str], places: Mapping[str, str]) -> list[str]:
    """Formats the pairs that move the workload. The driver's map also contains every other GPU of the host.

    Args:
        pairs: The driver's map.
        taken: UUIDs of the workload's new GPUs. Empty: unknown, so all moving pairs are returned.
        places: Short names of GPUs.
    """
    return [
        f"pair {places.get(pair.old_uuid, pair.old_uuid)} -> {places.get(pair.new_uuid, pair.new_uuid)}"
        for pair in pairs
        if pair.old_uuid != pair.new_uuid and (not taken or pair.new_uuid in taken)
    ]


def seconds_text(seconds: float) -> str:
    """Formats a time in milliseconds or seconds."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.1f} s"
