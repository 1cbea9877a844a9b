"""The entries of the audit that are stored in the transaction of a change, a report or a command's end."""

from hashlib import sha256
from typing import Final

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from leasehold.v1 import audit_pb2, errors_pb2, workload_pb2
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.command_pb2 import Command
from leasehold.v1.enrolment_service_pb2 import JoinRequest
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.worker_bindings import WorkerBinding
from leasehold_coordinator.command_workloads import workload_ids
from leasehold_coordinator.core.redaction import without_secrets
from leasehold_coordinator.core.workload_reports import is_of_host, is_presumed
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.fleet.callers import current_caller, current_request
from leasehold_coordinator.log_format import printable
from leasehold_coordinator.storage.rows import AuditRow
from leasehold_coordinator.timestamps import now_timestamp

ARGUMENTS_LIMIT_BYTES: Final = 4_096
"""Most bytes of a request in an entry."""

CONNECT: Final = "/leasehold.worker.v1.SessionService/Connect"
"""The method of the sessions of workers."""

TEXT_LIMIT: Final = 256
"""Most characters of a message, a method or a resource, such as of the workloads of a large remap."""

WORKER_REFUSALS: Final = frozenset({errors_pb2.ERROR_REASON_NOT_PERMITTED})
"""Reasons of workers that refuse a command because its owner lacks a right on their hosts."""

HOST_END: Final = "host/end"
"""The method of the end of a workload of a worker's host, which is no call."""

_ORIGINS: Final = {
    workload_pb2.WORKLOAD_ORIGIN_EXEC: "exec",
    workload_pb2.WORKLOAD_ORIGIN_CLAIM: "claim",
}
"""Origins of workloads that local users register. Others are of commands that the store does not know."""


def change_rows(resource: str, command_id: str = "") -> tuple[AuditRow, ...]:
    """The row of a change that the current call makes. Write it in the transaction of the change.

    Args:
        resource: What is changed, as KIND/ID.
        command_id: The command that the change creates or cancels. Empty: none.

    Returns:
        One row. None if no call is served: Leasehold itself makes the change.
    """
    caller, request = current_caller(), current_request()
    if caller is None or request is None:
        return ()
    return call_rows(caller, *request, resource, command_id)


def call_rows(
    caller: Caller, method: str, request: Message, resource: str, command_id: str = ""
) -> tuple[AuditRow]:
    """The row of a change that a call outside the services for clients makes, as of :func:`change_rows`.

    Args:
        caller: Who calls.
        method: Full name of the method.
        request: The request.
        resource: What is changed.
        command_id: The command. Empty: none.
    """
    entry = AuditEntry(
        time=now_timestamp(),
        identity=str(caller.identity),
        address=caller.address,
        on_behalf_of=str(caller.on_behalf_of or ""),
        method=method,
        resource=resource[:TEXT_LIMIT],
        outcome=audit_pb2.AUDIT_OUTCOME_ALLOWED,
        count=1,
        command_id=command_id,
    )
    entry.arguments, entry.arguments_digest = _arguments(request)
    return (AuditRow(entry),)


def command_rows(command: Command) -> tuple[AuditRow, ...]:
    """The row of a call that creates or cancels a command, as of :func:`change_rows`."""
    return change_rows(_resource(command), command.command_id)


def refused_command_rows(command: Command) -> tuple[AuditRow, ...]:
    """The row of a command that its worker refused for one of :data:`WORKER_REFUSALS`.

    Write it in the transaction of the command's end. The row has no address and no arguments: the row of the
    command's creation has them, with the same command id.

    Args:
        command: The command as it ended.

    Returns:
        One row. None if the command had another outcome.
    """
    error = command.error
    if error.reason not in WORKER_REFUSALS:
        return ()
    worker = f"worker/{command.worker_id}"
    entry = AuditEntry(
        time=now_timestamp(),
        identity=command.actor,
        on_behalf_of=command.on_behalf_of,
        method=CONNECT,
        resource=", ".join(dict.fromkeys((worker, _resource(command))))[:TEXT_LIMIT],
        outcome=audit_pb2.AUDIT_OUTCOME_REFUSED,
        reason=error.reason,
        message=audited_text(error.message),
        count=1,
        command_id=command.command_id,
    )
    return (AuditRow(entry),)


def host_rows(workload: Workload, address: str, *, is_new: bool) -> tuple[AuditRow, ...]:
    """The rows of a workload of its worker's host: of its registration, and of its end.

    Write them in the transaction of the worker's report. The identity is the owner of the workload, such as
    "host/alpha/ann". A command that ended the workload has a row of its own. A presumed end has no row: a
    worker that connects again and again could repeat that end without limit.

    Args:
        workload: The record that the report changes.
        address: The host of the worker's session.
        is_new: The report registers the workload.

    Returns:
        At most two rows. None if the workload began by a command, or neither begins nor ends now.
    """
    if not is_of_host(workload):
        return ()
    methods = [f"host/{_ORIGINS.get(workload.origin, 'report')}"] if is_new else []
    if is_ended(workload.status.state) and not is_presumed(workload):
        methods.append(HOST_END)
    return tuple(
        AuditRow(
            AuditEntry(
                time=now_timestamp(),
                identity=audited_text(workload.owner),
                address=address,
                method=method,
                resource=audited_text(f"workload/{workload.workload_id}"),
                outcome=audit_pb2.AUDIT_OUTCOME_ALLOWED,
                count=1,
            )
        )
        for method in methods
    )


def _resource(command: Command) -> str:
    """The workloads of a command, or its worker if it has none."""
    workloads = ", ".join(f"workload/{workload_id}" for workload_id in workload_ids(command))
    return workloads or f"worker/{command.worker_id}"


def audited_text(text: str) -> str:
    """A text of a peer, cut and without control characters."""
    return printable(text[:TEXT_LIMIT])[:TEXT_LIMIT]


def binding_rows(binding: WorkerBinding, address: str) -> tuple[AuditRow]:
    """The row of a worker id and GPUs that a hello binds to the identity of its certificate."""
    caller = Caller(Identity(Kind.WORKER, binding.name), address)
    claimed = JoinRequest(worker_id=binding.worker_id, gpu_uuids=sorted(binding.gpu_uuids))
    return call_rows(caller, CONNECT, claimed, str(caller.identity))


def _arguments(request: Message) -> tuple[str, bytes]:
    """A request without secrets as JSON, the first 4 KiB, and the SHA-256 of the whole."""
    text = MessageToJson(
        without_secrets(request), preserving_proto_field_name=True, indent=None, sort_keys=True
    )
    data = text.encode()
    shown = (
        text if len(data) <= ARGUMENTS_LIMIT_BYTES else data[:ARGUMENTS_LIMIT_BYTES].decode(errors="ignore")
    )
    return shown, sha256(data).digest()
