"""Turns records into rows of the store."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import sqlalchemy as sa
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.event_pb2 import Event
from leasehold.v1.lease_pb2 import LeaseSpan
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.access.bindings import binding_key
from leasehold_coordinator.access.certificates import ClientCertificate, Revocation
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.command_states import is_terminal
from leasehold_coordinator.core.hello_rules import description
from leasehold_coordinator.core.request_ids import scoped_id
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.storage import schema
from leasehold_coordinator.timestamps import unix_ns


@dataclass(frozen=True, slots=True)
class StoredWorker:
    """A stored worker: its epoch and its last hello, without leases and workloads.

    Attributes:
        epoch: The epoch.
        hello: The hello.
        has_left: The worker said goodbye at the end of its last session.
    """

    epoch: int
    hello: Hello
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row to insert or replace."""

    table: sa.Table
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OldRows:
    """A deletion of the oldest rows, at most 500, that ended more than ``retention_s`` of service ago.

    Attributes:
        table: The table.
        retention_s: The age in seconds of service.
        is_large: Whether only rows with large records are deleted, or only others. None: rows of any size.
        deleted: The keys of the deleted rows, once the write has returned.
    """

    table: sa.Table
    retention_s: float
    is_large: bool | None = None
    deleted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CommandsOf:
    """Commands to delete, a few at a time: those about a workload that have ended.

    Attributes:
        workload_id: The workload.
        deleted: The ids of the deleted commands, once the write has returned.
    """

    table: ClassVar[sa.Table] = schema.commands

    workload_id: str
    deleted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Gone:
    """One row to delete, by its key."""

    table: sa.Table
    key: str


@dataclass(frozen=True, slots=True)
class AuditRow:
    """An entry to add to the audit. The writer numbers the entry and chains it to the one before."""

    table: ClassVar[sa.Table] = schema.audit

    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class OldAudit:
    """A deletion of the oldest entries of the audit, at most 500, older than ``retention_s`` of service."""

    table: ClassVar[sa.Table] = schema.audit

    retention_s: float


Change: TypeAlias = Row | OldRows | CommandsOf | Gone | AuditRow | OldAudit


def worker_row(epoch: int, hello: Hello, *, has_left: bool = False) -> Row:
    """A worker's row."""
    record = description(hello).SerializeToString()
    return Row(
        schema.workers,
        {"worker_id": hello.worker_id, "epoch": epoch, "hello": record, "has_left": has_left},
    )


def clock_row(highest_time_ns: int) -> Row:
    """The row with the store's clocks."""
    return Row(schema.clock, {"clock_id": "served", "highest_time_ns": highest_time_ns})


def certificate_row(certificate: ClientCertificate) -> Row:
    """A client certificate's row."""
    return Row(
        schema.certificates,
        {
            "serial": certificate.serial,
            "identity": str(certificate.identity),
            "fingerprint": certificate.fingerprint,
            "predecessor": certificate.predecessor,
            "authority": certificate.authority,
            "not_before_ns": unix_ns(certificate.not_before),
            "not_after_ns": unix_ns(certificate.not_after),
            "certificate": certificate.der,
        },
    )


def revocation_row(revocation: Revocation) -> Row:
    """The row of a revoked serial number, or of a blocked identity."""
    return Row(
        schema.revocations,
        {
            "subject": revocation.subject,
            "actor": revocation.actor,
            "create_time_ns": revocation.create_time_ns,
        },
    )


def workload_row(workload: Workload) -> Row:
    """A workload's row."""
    return Row(
        schema.workloads,
        {
            "workload_id": workload.workload_id,
            "name": workload.name,
            "worker_id": workload.worker_id,
            "ended": is_ended(workload.status.state),
            "create_time_ns": workload.create_time.ToNanoseconds(),
            "record": workload.SerializeToString(),
        },
    )


def deletion_row(workload: Workload) -> Row:
    """The row that remembers that a workload was deleted."""
    return Row(schema.deletions, {"workload_id": workload.workload_id, "worker_id": workload.worker_id})


def command_row(stored: StoredCommand) -> Row:
    """A command's row."""
    command = stored.command
    return Row(
        schema.commands,
        {
            "command_id": command.command_id,
            "request_id": scoped_id(command) or None,
            "request_digest": stored.request_digest or None,
            "workload_id": command.workload_id,
            "worker_id": command.worker_id,
            "instance_id": stored.instance_id,
            "accepted": stored.accepted,
            "cancel_requested": stored.cancel_requested,
            "ended": is_terminal(command.state),
            "create_time_ns": command.create_time.ToNanoseconds(),
            "record": command.SerializeToString(),
        },
    )


def binding_row(binding: RoleBinding) -> Row:
    """A role binding's row."""
    return Row(
        schema.role_bindings,
        {"binding_key": binding_key(binding), "record": binding.SerializeToString()},
    )


def event_row(event: Event) -> Row:
    """An event's row."""
    return Row(
        schema.events,
        {
            "event_id": event.event_id,
            "worker_id": event.worker_id,
            "workload_id": event.workload_id,
            "create_time_ns": event.time.ToNanoseconds(),
            "record": event.SerializeToString(),
        },
    )


def lease_span_row(span: LeaseSpan) -> Row:
    """A lease span's row."""
    ended = span.HasField("end_time")
    return Row(
        schema.lease_spans,
        {
            "span_id": span.span_id,
            "gpu_uuid": span.gpu_uuid,
            "worker_id": span.worker_id,
            "workload_id": span.workload_id,
            "begin_time_ns": span.begin_time.ToNanoseconds(),
            "end_time_ns": span.end_time.ToNanoseconds() if ended else schema.OPEN_END_NS,
            "ended": ended,
            "record": span.SerializeToString(),
        },
    )
