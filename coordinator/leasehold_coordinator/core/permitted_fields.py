"""The permitted fields: a caller sees these of workloads, commands and GPUs of others. Pure.

Every field of these messages has a row, and a field without one is hidden. Filters see the same view, so they
reveal nothing more.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias, TypeVar

from google.protobuf.message import Message
from leasehold.v1.operation_pb2 import Operation

M = TypeVar("M", bound=Message)

Rows: TypeAlias = "Mapping[str, bool | Rows]"
"""By field: whether its value is shown, or the rows of the message in the field.

No rows: the field shows that there is a message, and nothing of it.
"""

SHOWN: Final = True
HIDDEN: Final = False
PRESENCE: Final[Rows] = {}

WORKLOAD: Final[Rows] = {
    "workload_id": SHOWN,
    "name": SHOWN,
    "worker_id": SHOWN,
    "spec": HIDDEN,
    "status": {
        "state": SHOWN,
        "generation": HIDDEN,
        "lease": {
            "lease_id": HIDDEN,
            "workload_id": SHOWN,
            "gpu_uuids": SHOWN,
            "grant_time": HIDDEN,
            "fencing_token": HIDDEN,
        },
        "members": HIDDEN,
        "root_pid": HIDDEN,
        "parked_gpu_uuids": HIDDEN,
        "parked_bytes": HIDDEN,
        "park_time": HIDDEN,
        "parked_by": HIDDEN,
        "start_time": HIDDEN,
        "end_time": HIDDEN,
        "exit": HIDDEN,
        "error": HIDDEN,
        "yielded": HIDDEN,
        "checkpoint_id": HIDDEN,
        "disk_bytes": HIDDEN,
        "kernel": HIDDEN,
        "ready_time": SHOWN,
    },
    "create_time": SHOWN,
    "origin": HIDDEN,
    "user": HIDDEN,
    "out_of_contact": SHOWN,
    "report_time": SHOWN,
    "labels": HIDDEN,
    "annotations": HIDDEN,
    "etag": HIDDEN,
    "owner": SHOWN,
}
"""A workload of another owner. Readiness belongs to its state. Lists are sorted by the time of creation.

:meth:`.OwnerViews.workload` adds the reason of a running one's error.
"""

COMMAND: Final[Rows] = {
    "command_id": SHOWN,
    "request_id": HIDDEN,
    "worker_id": SHOWN,
    "workload_id": SHOWN,
    "expected_generation": HIDDEN,
    "timeout": HIDDEN,
    "operation": {field.name: PRESENCE for field in Operation.DESCRIPTOR.fields},
    "state": SHOWN,
    "phase": HIDDEN,
    "result": HIDDEN,
    "error": HIDDEN,
    "create_time": SHOWN,
    "update_time": HIDDEN,
    "end_time": HIDDEN,
    "revision": SHOWN,
    "actor": HIDDEN,
    "owners": HIDDEN,
    "on_behalf_of": HIDDEN,
    "cancel_requested": HIDDEN,
}
"""A command of others. Clients of a watch compare revisions."""

SHARED_COMMAND: Final[Rows] = {
    **COMMAND,
    "phase": SHOWN,
    "result": {
        "already_there": SHOWN,
        "members": HIDDEN,
        "applied_pairs": HIDDEN,
        "released_gpu_uuids": SHOWN,
        "claimed_gpu_uuids": SHOWN,
        "driver_version": SHOWN,
        "duration": SHOWN,
        "warnings": HIDDEN,
        "phases": HIDDEN,
        "policy": HIDDEN,
        "checkpoint_id": HIDDEN,
        "disk_bytes": HIDDEN,
        "hold_id": HIDDEN,
        "preempted_workload_ids": SHOWN,
    },
    "error": {"reason": SHOWN, "message": HIDDEN, "metadata": HIDDEN},
    "update_time": SHOWN,
    "end_time": SHOWN,
    "actor": SHOWN,
    "owners": SHOWN,
    "on_behalf_of": SHOWN,
    "cancel_requested": SHOWN,
}
"""A command about workloads of several owners, for one of them."""

ACTORS_COMMAND: Final[Rows] = {
    **SHARED_COMMAND,
    "request_id": SHOWN,
    "expected_generation": SHOWN,
    "timeout": SHOWN,
    "operation": SHOWN,
}
"""A command about workloads of several owners, for the caller that requested it."""

EVENT: Final[Rows] = {
    "event_id": SHOWN,
    "time": SHOWN,
    "kind": SHOWN,
    "worker_id": SHOWN,
    "worker_name": SHOWN,
    "workload_id": SHOWN,
    "workload_name": SHOWN,
    "command_id": HIDDEN,
    "message": HIDDEN,
    "actor": HIDDEN,
    "owner": HIDDEN,
}
"""An event about a workload or a command of others, or whose message is for operators."""

LEASE_SPAN: Final[Rows] = {
    "span_id": SHOWN,
    "gpu_uuid": SHOWN,
    "worker_id": SHOWN,
    "worker_name": SHOWN,
    "slot": SHOWN,
    "state": SHOWN,
    "lease_id": HIDDEN,
    "workload_id": SHOWN,
    "workload_name": SHOWN,
    "owner": HIDDEN,
    "begin_time": SHOWN,
    "end_time": SHOWN,
    "parked": SHOWN,
}
"""A use of a GPU by a workload of others, or its parked time. docs/security.md permits that."""

GPU: Final[Rows] = {
    "worker_id": SHOWN,
    "worker_name": SHOWN,
    "gpu": SHOWN,
    "lease": {
        "gpu_uuid": SHOWN,
        "slot": SHOWN,
        "state": SHOWN,
        "lease_id": HIDDEN,
        "workload_id": SHOWN,
        "since": SHOWN,
        "health": SHOWN,
        "sample": SHOWN,
        "health_reason": SHOWN,
        "cordon": SHOWN,
        "foreign_processes": {
            "pid": SHOWN,
            "user": SHOWN,
            "command": HIDDEN,
            "device_memory_bytes": SHOWN,
            "workload_id": SHOWN,
            "workload_name": SHOWN,
        },
        "asleep_bytes": SHOWN,
        "hold": {
            "hold_id": HIDDEN,
            "workload_ids": SHOWN,
            "held_by": HIDDEN,
            "create_time": SHOWN,
            "expire_time": SHOWN,
        },
    },
    "workload_name": SHOWN,
    "report_time": SHOWN,
}
"""A GPU, for users and viewers. Workers are shown to them as they are."""


def restricted(message: M, rows: Rows) -> M:
    """A copy of a message with the permitted fields only."""
    view = type(message)()
    view.CopyFrom(message)
    view.DiscardUnknownFields()
    _clear_hidden(view, rows)
    return view


def _clear_hidden(message: Message, rows: Rows) -> None:
    for field, value in message.ListFields():
        row = rows.get(field.name, HIDDEN)
        if row is HIDDEN:
            message.ClearField(field.name)
        elif not isinstance(row, bool):
            for part in value if field.is_repeated else (value,):
                _clear_hidden(part, row)
