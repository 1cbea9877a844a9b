"""Tables for people: aligned columns without colour."""

from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.message import Message
from leasehold.v1.access_service_pb2 import Role, RoleBinding
from leasehold.v1.audit_pb2 import AuditEntry, AuditOutcome
from leasehold.v1.checkpoint_pb2 import Checkpoint, CheckpointKind
from leasehold.v1.command_pb2 import Command
from leasehold.v1.enrolment_service_pb2 import JoinToken
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.event_pb2 import Event, EventKind

from leasehold_client.byte_sizes import size_text
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import safe_cell
from leasehold_client.messages import command_state, enum_name, operation_name, time_text


def echo_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints aligned columns without colour, since the output may be a file."""
    for line in table_lines([headings, *rows]):
        echo(line)


def table_lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligns rows of equal length."""
    cells = [[safe_cell(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def field_size(message: Message, field: str) -> str:
    """Formats an optional field in bytes. "?": unset."""
    return size_text(getattr(message, field)) if message.HasField(field) else "?"


def echo_events(events: Iterable[Event]) -> None:
    """Prints a table of events."""
    echo_table(
        ["TIME", "KIND", "MESSAGE"],
        [
            [
                time_text(event.time),
                enum_name(EventKind.Name, event.kind, "EVENT_KIND_"),
                event_text(event),
            ]
            for event in events
        ],
    )


def event_text(event: Event) -> str:
    """The message of an event, or what the event is about if its message is for others."""
    about = event.workload_name or (f"worker {event.worker_name}" if event.worker_name else "-")
    return event.message or about


def echo_audit(entries: Iterable[AuditEntry]) -> None:
    """Prints a table of entries of the audit."""
    echo_table(
        ["NUMBER", "TIME", "IDENTITY", "ADDRESS", "METHOD", "RESOURCE", "OUTCOME", "COUNT", "COMMAND"],
        [
            [
                str(entry.number),
                time_text(entry.time),
                f"{entry.identity or '-'}{f' for {entry.on_behalf_of}' if entry.on_behalf_of else ''}",
                entry.address or "-",
                entry.method.rpartition("/")[2] or "-",
                entry.resource or "-",
                _outcome(entry),
                str(entry.count),
                entry.command_id or "-",
            ]
            for entry in entries
        ],
    )


def _outcome(entry: AuditEntry) -> str:
    """The outcome, or the reason of a refusal."""
    if entry.reason:
        return enum_name(ErrorReason.Name, entry.reason, "ERROR_REASON_")
    return enum_name(AuditOutcome.Name, entry.outcome, "AUDIT_OUTCOME_")


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


def echo_join_tokens(tokens: Iterable[JoinToken]) -> None:
    """Prints a table of join tokens."""
    echo_table(
        ["ID", "IDENTITY", "USES LEFT", "EXPIRES", "REPLACES", "CREATOR"],
        [
            [
                one.join_token_id,
                one.identity,
                str(one.uses_left),
                time_text(one.expire_time),
                "yes" if one.replace else "-",
                one.creator or "-",
            ]
            for one in tokens
        ],
    )


def role_text(binding: RoleBinding) -> str:
    """A role, with its users if there are any."""
    role = enum_name(Role.Name, binding.role, "ROLE_").lower()
    return f"{role} for {binding.users}" if binding.users else role


def echo_bindings(bindings: Iterable[RoleBinding]) -> None:
    """Prints a table of role bindings."""
    echo_table(
        ["IDENTITY", "ROLE", "GRANTED BY", "GRANTED"],
        [[one.identity, role_text(one), one.granted_by, time_text(one.grant_time)] for one in bindings],
    )


def echo_checkpoints(checkpoints: Iterable[Checkpoint], worker_names: Mapping[str, str]) -> None:
    """Prints a table of checkpoints, with their owners if there are several.

    Args:
        checkpoints: The checkpoints.
        worker_names: Names of workers by id.
    """
    listed = list(checkpoints)
    has_owners = len({one.owner for one in listed if one.owner}) > 1
    echo_table(
        ["ID", "KIND", "WORKLOAD", *["OWNER"] * has_owners, "WORKER", "SIZE", "CREATED", "IN USE"],
        [
            [
                one.checkpoint_id,
                _kind(one),
                one.workload_name or one.workload_id,
                *[one.owner or "-"] * has_owners,
                worker_names.get(one.worker_id, one.worker_id),
                size_text(one.size_bytes),
                time_text(one.create_time),
                "yes" if one.in_use else "-",
            ]
            for one in listed
        ],
    )


def _kind(checkpoint: Checkpoint) -> str:
    kind = enum_name(CheckpointKind.Name, checkpoint.kind, "CHECKPOINT_KIND_").lower()
    return f"{kind}, damaged" if checkpoint.problem else kind
