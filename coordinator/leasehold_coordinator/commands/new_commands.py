"""Ids and names of new workloads, and new commands."""

import re
import secrets
import uuid
from collections.abc import Iterable
from typing import Final

from google.protobuf import duration_pb2
from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.operation_pb2 import Operation

from leasehold_coordinator.core.field_rules import check_duration
from leasehold_coordinator.core.operation_rules import check_size
from leasehold_coordinator.core.workload_reports import is_of_host
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.callers import caller, on_behalf_of, owner
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")


def new_workload_id() -> str:
    """A random id for a workload."""
    return f"w-{secrets.token_hex(6)}"


def new_name(workloads: LiveWorkloads, field: str, wanted: str, workload_id: str) -> str:
    """The name of a new workload: the requested name, or the id.

    Two owners may have workloads of one name. The id of a workload that began on a host is no obstacle
    either, since its worker chose it: a worker can't deny names to users.

    Raises:
        FleetError: INVALID_ARGUMENT, or WORKLOAD_EXISTS.
    """
    if not wanted:
        return workload_id
    if not _NAME.fullmatch(wanted):
        raise invalid(
            field,
            f"invalid name {wanted!r}: start with a letter, then use letters, digits, '-', '_' or '.', "
            "63 in all",
        )
    by_id = workloads.get(wanted)
    is_id = by_id is not None and not is_of_host(by_id)
    if is_id or any(workload.owner == owner() for workload in workloads.named(wanted)):
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
            f"a workload with the name or id {wanted!r} has not ended: stop it, or choose another name",
            field=field,
        )
    return wanted


def new_command(
    request_id: str,
    worker_id: str,
    operation: Operation,
    timeout: duration_pb2.Duration,
    workload_id: str = "",
    owners: Iterable[str] = (),
) -> Command:
    """A new command of the present caller, without state.

    Args:
        request_id: The request's id. Empty: none.
        worker_id: The worker that carries out the command.
        operation: The operation.
        timeout: Limit for wait and execution together.
        workload_id: The workload. Empty: none.
        owners: The owners of the workloads.

    Raises:
        FleetError: INVALID_ARGUMENT, the timeout is out of range, or the command is too large.
    """
    check_duration("timeout", timeout)
    command = Command(
        command_id=f"c-{uuid.uuid4().hex[:16]}",
        actor=caller(),
        on_behalf_of=on_behalf_of(),
        owners=dict.fromkeys(owners),
        request_id=request_id,
        worker_id=worker_id,
        workload_id=workload_id,
        operation=operation,
        timeout=timeout,
    )
    check_size(command.ByteSize())
    return command
