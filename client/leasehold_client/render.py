"""Messages as tables for people and as JSON for programs."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import workload_pb2
from leasehold.v1.command_pb2 import Command, CommandResult, CommandState, PhaseTiming
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.events_pb2 import Event, EventKind
from leasehold.v1.fleet_pb2 import FleetGpu
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.workload_pb2 import MemberState, Workload

from leasehold_client.errors import LeaseholdError
from leasehold_client.policies import policy_text
from leasehold_client.standard_output import echo
from leasehold_client.terminal_text import safe_cell

Value = TypeVar("Value", bound=int)

PARKED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_SLEEPING,
        workload_pb2.WORKLOAD_STATE_SUSPENDED,
        workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
        workload_pb2.WORKLOAD_STATE_STOPPED,
    }
)
"""States of workloads that wait to be woken."""

_GPU_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def to_dict(message: Message) -> dict[str, Any]:
    """A message as JSON has it, with the names of the proto.

    Raises:
        LeaseholdError: JSON can't say it: the peer sent a time that no calendar has.
    """
    from google.protobuf import json_format  # late: a table needs none

    try:
        return json_format.MessageToDict(message, preserving_proto_field_name=True)
    except json_format.SerializeToJsonError as error:
        raise LeaseholdError(
            f"the answer can't be printed as JSON ({error}): look at the log of whoever sent it, or print a "
            "table instead"
        ) from error


def echo_json(document: object) -> None:
    """Prints one JSON document."""
    echo(json.dumps(document, indent=2))


def echo_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints aligned columns, without colour: the output may go anywhere."""
    for line in table_lines([headings, *rows]):
        echo(line)


def table_lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of equally many cells as aligned lines."""
    cells = [[safe_cell(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def gpu_places(gpus: Iterable[FleetGpu]) -> dict[str, str]:
    """Short names of GPUs, worker/slot, by UUID."""
    return {gpu.gpu.uuid: f"{gpu.worker_name}/{gpu.gpu.slot}" for gpu in gpus}


def names_gpus(text: str) -> bool:
    """Whether a text names a GPU by UUID."""
    return _GPU_UUID.search(text) is not None


def with_places(text: str, places: Mapping[str, str]) -> str:
    """A text of a worker, which names GPUs by UUID, with their short names."""
    return _GPU_UUID.sub(lambda found: places.get(found[0], found[0]), text)


def pair_lines(pairs: Iterable[GpuPair], taken: Collection[str], places: Mapping[str, str]) -> list[str]:
    """The pairs that move something of one's own. The driver's map has each other GPU of the host too.

    Args:
        pairs: The driver's map.
        taken: UUIDs of the GPUs that are taken. Empty: these are unknown, and all pairs are told.
        places: Short names of GPUs.
    """
    return [
        f"pair {places.get(pair.old_uuid, pair.old_uuid)} -> {places.get(pair.new_uuid, pair.new_uuid)}"
        for pair in pairs
        if pair.old_uuid != pair.new_uuid and (not taken or pair.new_uuid in taken)
    ]


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


def echo_events(events: Iterable[Event]) -> None:
    """Prints a table of events."""
    echo_table(
        ["TIME", "KIND", "MESSAGE"],
        [
            [time_text(event.time), enum_name(EventKind.Name, event.kind, "EVENT_KIND_"), event.message]
            for event in events
        ],
    )


def echo_commands(commands: Iterable[Command]) -> None:
    """Prints a table of commands."""
    echo_table(
        ["ID", "OPERATION", "ABOUT", "STATE", "CREATED", "MESSAGE"],
        [
            [
                command.command_id,
                operation_name(command),
                command.workload_id or command.worker_id,
                command_state(command),
                time_text(command.create_time),
                command.error.message or "-",
            ]
            for command in commands
        ],
    )


def operation_name(command: Command) -> str:
    """What a command does."""
    return command.operation.WhichOneof("kind") or "?"


def is_about_worker(command: Command) -> bool:
    """Whether a command is about a worker, its GPUs or its disk, and about no workload."""
    return operation_name(command) in ("cordon", "uncordon", "reset_gpu_health", "delete_checkpoints")


def command_state(command: Command) -> str:
    """The state of a command."""
    return enum_name(CommandState.Name, command.state, "COMMAND_STATE_")


def echo_outcome(command: Command, workload_name: str, gpus: Iterable[FleetGpu]) -> None:
    """Prints what a command that succeeded did."""
    places = gpu_places(gpus)
    result = command.result
    seconds = duration_s(result.duration)
    what = "done" if is_about_worker(command) else f"done in {seconds:.2f} s"
    if result.already_there:
        what = "nothing to do"
    echo(f"{workload_name}: {operation_name(command)} {what}")
    if timing := timing_line(result):
        echo(f"  {timing}")
    if result.HasField("policy"):
        echo(f"  parked by {policy_text(result.policy)}")
    if result.HasField("checkpoint_id"):
        echo(f"  checkpoint {result.checkpoint_id}")
    if result.HasField("disk_bytes"):
        echo(f"  {size(result.disk_bytes)} on disk")
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
    moved = f" ({size(phase.moved_bytes)})" if phase.HasField("moved_bytes") else ""
    return f"{phase.phase} {seconds:.2f} s{moved}"


def timing_line(result: CommandResult) -> str:
    """How long each phase of a whole operation took, with the memory that it moved and how fast."""
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
    return f"{text} ({size(moved_bytes)}, {size(int(moved_bytes / seconds))}/s)"


def failure_lines(command: Command) -> list[str]:
    """Why a command did not succeed, what became of each of its members, and what deserves attention."""
    reason = reason_name(command.error.reason)
    state = command_state(command)
    message = " ".join(command.error.message.split())
    return [
        f"{operation_name(command)} {state}: {message} ({reason})",
        *member_lines(command),
        *(f"  warning: {warning}" for warning in command.result.warnings),
    ]


def member_lines(command: Command) -> list[str]:
    """What became of each member of a command that failed. What the command's error says is not repeated."""
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


def size(count_bytes: int) -> str:
    """Bytes for people."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.1f} s"


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
