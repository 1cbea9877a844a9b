"""The owner rule: users see and change their own workloads, and operators those of all users.

The caller is the one whose call the current task serves. A task without a call is Leasehold itself.
"""

from collections.abc import Iterable

from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.core.owner_views import OwnerViews, acting
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import current_caller, require_caller


def current_views() -> OwnerViews:
    """The view of the caller."""
    caller = _restricted_caller()
    return OwnerViews(None if caller is None else str(caller.owner))


def is_operator() -> bool:
    """Whether the owner rule does not restrict the caller."""
    return _restricted_caller() is None


def is_own(owner: str) -> bool:
    """Whether the caller may act on what this identity owns."""
    caller = _restricted_caller()
    return caller is None or str(caller.owner) == owner


def require_own(workloads: Iterable[Workload]) -> None:
    """Refuses a request about workloads of others.

    Raises:
        FleetError: NOT_PERMITTED.
    """
    for workload in workloads:
        _require(workload, is_own(workload.owner))


def require_preemptible(workloads: Iterable[Workload]) -> None:
    """Refuses to preempt workloads of others, except those that their owners made preemptible.

    Raises:
        FleetError: NOT_PERMITTED.
    """
    for workload in workloads:
        _require(workload, is_own(workload.owner) or workload.spec.HasField("helper"))


def _require(workload: Workload, is_permitted: bool) -> None:
    if not is_permitted:
        owner = workload.owner or "nobody"
        raise _refusal(f"workload {workload.name} belongs to {owner}")


def require_cancellable(command: Command) -> None:
    """Refuses to cancel a command, unless the caller requested it or owns all of its workloads.

    Raises:
        FleetError: NOT_PERMITTED.
    """
    if is_own(acting(command)) or (command.owners and all(map(is_own, command.owners))):
        return
    raise _refusal(f"command {command.command_id} belongs to others")


def disguised(unknown: FleetError, what: str) -> FleetError:
    """The refusal to act on an object of others whose existence the caller must not learn.

    Args:
        unknown: The answer to the caller, as for an object that does not exist.
        what: What belongs to whom, for the audit.
    """
    unknown.audited = _refusal(what)
    return unknown


def _refusal(what: str) -> FleetError:
    caller = require_caller()
    return FleetError(
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        f"{what}, and {caller} may act on own workloads only: ask the owner, or an admin for "
        f"`leasehold access grant operator {caller.owner}`",
        identity=str(caller.identity),
    )


def _restricted_caller() -> Caller | None:
    """The caller, if the owner rule restricts it."""
    caller = current_caller()
    return None if caller is None or caller.sees_all else caller
