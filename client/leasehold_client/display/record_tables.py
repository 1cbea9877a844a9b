"""Tables of records: events, the audit, commands, checkpoints, join tokens and role bindings."""

from collections.abc import Mapping, Sequence
from typing import Final

from leasehold.v1.access_service_pb2 import Role, RoleBinding
from leasehold.v1.audit_pb2 import AuditEntry, AuditOutcome
from leasehold.v1.checkpoint_pb2 import Checkpoint, CheckpointKind
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.enrolment_service_pb2 import JoinToken
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.event_pb2 import Event, EventKind

from leasehold_client.arguments.gpu_names import places_text, with_places
from leasehold_client.byte_sizes import size_text
from leasehold_client.coordinator.command_watch import has_ended
from leasehold_client.display.tables import Column
from leasehold_client.messages import (
    actor_text,
    age_text,
    command_state,
    enum_name,
    gpu_targets,
    operation_name,
    reason_name,
    time_text,
    workload_targets,
)


def event_columns(places: Mapping[str, str]) -> Sequence[Column[Event]]:
    """Columns of events.

    Args:
        places: Short names of GPUs and workloads in messages, by UUID and id.
    """
    return (
        Column("AGE", lambda event: age_text(event.time)),
        Column("TIME", lambda event: time_text(event.time), is_wide=True),
        Column("KIND", lambda event: enum_name(EventKind.Name, event.kind, "EVENT_KIND_"), drop=1),
        Column("WORKER", lambda event: event.worker_name or "-", is_wide=True),
        Column("WORKLOAD", lambda event: event.workload_name or "-", is_wide=True),
        Column("ACTOR", lambda event: event.actor or "-", is_wide=True),
        Column("ID", lambda event: event.event_id, is_wide=True),
        Column("MESSAGE", lambda event: with_places(event_text(event), places), shrinks=True),
    )


def event_text(event: Event) -> str:
    """The message of an event, or what the event is about if its message is for others."""
    about = event.workload_name or (f"worker {event.worker_name}" if event.worker_name else "-")
    return event.message or about


AUDIT_COLUMNS: Final[Sequence[Column[AuditEntry]]] = (
    Column("NUMBER", lambda entry: str(entry.number), drop=2),
    Column("TIME", lambda entry: time_text(entry.time)),
    Column("IDENTITY", lambda entry: _identity(entry), shrinks=True),
    Column("METHOD", lambda entry: entry.method.rpartition("/")[2] or "-"),
    Column("RESOURCE", lambda entry: entry.resource or "-", drop=1, shrinks=True),
    Column("OUTCOME", lambda entry: _outcome(entry), is_state=True),
    Column("COUNT", lambda entry: str(entry.count), drop=3),
    Column("ADDRESS", lambda entry: entry.address or "-", is_wide=True),
    Column("COMMAND", lambda entry: entry.command_id or "-", is_wide=True),
)
"""Columns of the audit. Its times are absolute, since they are compared with those of other records."""


def _identity(entry: AuditEntry) -> str:
    return f"{entry.identity or '-'}{f' for {entry.on_behalf_of}' if entry.on_behalf_of else ''}"


def _outcome(entry: AuditEntry) -> str:
    """The outcome, or the reason of a refusal."""
    if entry.reason:
        return enum_name(ErrorReason.Name, entry.reason, "ERROR_REASON_")
    return enum_name(AuditOutcome.Name, entry.outcome, "AUDIT_OUTCOME_")


def command_about(command: Command, names: Mapping[str, str]) -> str:
    """The target of a command: workloads, GPUs or a worker.

    Args:
        command: The command.
        names: Names of workloads and workers by id, and of GPUs by UUID. Without a name, the id is shown.
    """
    if uuids := gpu_targets(command):
        return places_text(uuids, names)
    targets = workload_targets(command) or [command.worker_id]
    return ", ".join(names.get(target, target) for target in targets)


def command_columns(names: Mapping[str, str]) -> Sequence[Column[Command]]:
    """Columns of commands.

    Args:
        names: Names as for :func:`command_about`.
    """
    return (
        Column("ID", lambda command: command.command_id),
        Column("OPERATION", operation_name),
        Column("ABOUT", lambda command: command_about(command, names), drop=3, shrinks=True),
        Column("STATE", _command_state, is_state=True),
        Column("AGE", lambda command: age_text(command.create_time), drop=1),
        Column("PHASE", lambda command: command.phase or _no_value(command), is_wide=True),
        Column("ACTOR", lambda command: actor_text(command) or _no_value(command), is_wide=True),
        Column("CREATED", lambda command: time_text(command.create_time), is_wide=True),
        Column("MESSAGE", _command_message, drop=2, shrinks=True),
    )


def _no_value(command: Command) -> str:
    """The text of an unset field. A command whose fields are hidden lacks the time of its last change too."""
    return "-" if command.HasField("update_time") else "?"


def _command_message(command: Command) -> str:
    """The message of a failure, or the reason if the message is hidden. "?": hidden; "-": no failure."""
    if command.HasField("error"):
        return command.error.message or reason_name(command.error.reason)
    has_failed = has_ended(command.state) and command.state != COMMAND_STATE_SUCCEEDED
    return "?" if has_failed else "-"


def _command_state(command: Command) -> str:
    state = command_state(command)
    is_open = not command.HasField("end_time")
    return f"{state},cancelling" if command.cancel_requested and is_open else state


def checkpoint_columns(worker_names: Mapping[str, str]) -> Sequence[Column[Checkpoint]]:
    """Columns of checkpoints.

    Args:
        worker_names: Names of workers by id.
    """
    return (
        Column("ID", lambda one: one.checkpoint_id),
        Column("KIND", _kind, drop=2),
        Column("WORKLOAD", lambda one: one.workload_name or one.workload_id, shrinks=True),
        Column("OWNER", lambda one: one.owner or "-", is_wide=True),
        Column("WORKER", lambda one: worker_names.get(one.worker_id, one.worker_id), drop=3),
        Column("SIZE", lambda one: size_text(one.size_bytes)),
        Column("AGE", lambda one: age_text(one.create_time), drop=1),
        Column("CREATED", lambda one: time_text(one.create_time), is_wide=True),
        Column("IN USE", _use),
    )


def _use(checkpoint: Checkpoint) -> str:
    if checkpoint.in_use_unknown:
        return "?"
    return "yes" if checkpoint.in_use else "-"


def _kind(checkpoint: Checkpoint) -> str:
    kind = enum_name(CheckpointKind.Name, checkpoint.kind, "CHECKPOINT_KIND_").lower()
    return f"{kind}, damaged" if checkpoint.problem else kind


JOIN_TOKEN_COLUMNS: Final[Sequence[Column[JoinToken]]] = (
    Column("ID", lambda one: one.join_token_id),
    Column("IDENTITY", lambda one: one.identity, shrinks=True),
    Column("USES LEFT", lambda one: str(one.uses_left), drop=2),
    Column("EXPIRES", lambda one: age_text(one.expire_time)),
    Column("REPLACES", lambda one: "yes" if one.replace else "-", drop=3),
    Column("CREATOR", lambda one: one.creator or "-", drop=1, shrinks=True),
)


def role_text(binding: RoleBinding) -> str:
    """A role, with its users if there are any."""
    role = enum_name(Role.Name, binding.role, "ROLE_").lower()
    return f"{role} for {binding.users}" if binding.users else role


BINDING_COLUMNS: Final[Sequence[Column[RoleBinding]]] = (
    Column("IDENTITY", lambda one: one.identity, shrinks=True),
    Column("ROLE", role_text),
    Column("GRANTED BY", lambda one: one.granted_by, drop=2, shrinks=True),
    Column("AGE", lambda one: age_text(one.grant_time), drop=1),
)
