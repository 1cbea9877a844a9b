"""Finds the workloads and holds that a request names, if the caller may act on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from leasehold.v1 import errors_pb2
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.operation_rules import check_operation, check_state
from leasehold_coordinator.core.owner_views import acting
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.permissions import (
    disguised,
    is_operator,
    is_own,
    require_own,
    require_preemptible,
)


@final
@dataclass(frozen=True, slots=True)
class Target:
    """An operation, and its workloads in their states at the time of the request.

    Attributes:
        operation: The operation, with ids in place of names.
        workloads: At least one workload, each once. A remap's are in the order of its moves.
        preempted: Workloads that a restore suspends first, in order.
    """

    operation: Operation
    workloads: tuple[Workload, ...]
    preempted: tuple[Workload, ...] = ()

    @property
    def first(self) -> Workload:
        """The workload of the command record. ``expected_generation`` refers to this workload."""
        return self.workloads[0]

    @property
    def owners(self) -> list[str]:
        """Owners of all workloads, preempted ones included."""
        return [workload.owner for workload in (*self.workloads, *self.preempted)]

    @property
    def workload_ids(self) -> list[str]:
        """Ids of all workloads, preempted ones included."""
        return [workload.workload_id for workload in (*self.workloads, *self.preempted)]


async def find_target(fleet: FleetReader, workload: str, operation: Operation) -> Target:
    """Finds the workloads of an operation.

    Args:
        fleet: The fleet.
        workload: Id or name. Ignored for a remap: its moves name the workloads.
        operation: The requested operation, which is not changed.

    Raises:
        FleetError: UNKNOWN_WORKLOAD; NOT_PERMITTED, one belongs to another owner; UNKNOWN_HOLD; or
            INVALID_ARGUMENT for an invalid operation.
    """
    check_operation(operation)
    resolved = Operation()
    resolved.CopyFrom(operation)
    if not operation.HasField("remap"):
        first = await fleet.find_workload(workload)
        require_own([first])
        if operation.restore.hold_id and not is_operator():  # the worker knows whether it still exists
            await find_hold_worker(fleet, operation.restore.hold_id)
        preempted = await find_preempted(fleet, "operation.preempt", operation.restore.preempt)
        if any(found.workload_id == first.workload_id for found in preempted):
            raise invalid("operation.preempt", f"workload {first.name} can't preempt itself: leave it out")
        if preempted and preempted[0].worker_id != first.worker_id:
            raise invalid(
                "operation.preempt",
                f"{first.name} and {preempted[0].name} are on different workers: name workloads of the "
                f"worker of {first.name}",
            )
        if preempted:
            resolved.restore.preempt[:] = [found.workload_id for found in preempted]
        return Target(resolved, (first,), preempted)
    workloads: dict[str, Workload] = {}
    for index, move in enumerate(resolved.remap.moves):
        found = await fleet.find_workload(move.workload_id)
        require_own([found])
        if found.workload_id in workloads:
            raise invalid(
                f"operation.moves[{index}].workload_id",
                f"workload {found.name} has two moves: put all its pairs into one",
            )
        if len(resolved.remap.moves) > 1 and is_ended(found.status.state):
            check_state(found, operation)  # at once: each ended workload is a read of the store
        workloads[found.workload_id] = found
        move.workload_id = found.workload_id
    return Target(resolved, tuple(workloads.values()))


async def find_preempted(fleet: FleetReader, field: str, names: Sequence[str]) -> tuple[Workload, ...]:
    """The workloads to preempt, by ids or names, in order.

    Raises:
        FleetError: UNKNOWN_WORKLOAD; NOT_PERMITTED: another owner has not made one preemptible; WRONG_STATE:
            one can't be suspended; INVALID_ARGUMENT: one is named twice, or they are on several workers.
    """
    preempted: dict[str, Workload] = {}
    for name in names:
        found = await fleet.find_workload(name, field)
        require_preemptible([found])
        first = next(iter(preempted.values()), found)
        if found.workload_id in preempted:
            raise invalid(field, f"workload {found.name} is named twice: name it once")
        if found.worker_id != first.worker_id:
            raise invalid(field, f"{first.name} and {found.name} are on different workers: name those of one")
        check_state(found, Operation(suspend=SuspendOperation()))
        preempted[found.workload_id] = found
    return tuple(preempted.values())


async def find_hold_worker(fleet: FleetReader, hold_id: str) -> str:
    """The id of the worker on which a hold was made by the caller, whether or not the hold still exists.

    A hold has the id of the suspend's command, which names the worker. The worker's last load may be older
    than the hold.

    Raises:
        FleetError: UNKNOWN_HOLD, or STORAGE_UNAVAILABLE.
    """
    command = await fleet.find_command(hold_id)
    is_hold = command is not None and command.operation.suspend.HasField("hold_for")
    unknown = FleetError(
        errors_pb2.ERROR_REASON_UNKNOWN_HOLD,
        f"there is no hold {hold_id[:64]!r}: give the id of a hold, which `leasehold suspend --hold-for` "
        "prints and the suspend's result has as hold_id",
        field="hold_id",
    )
    if command is None or not is_hold:
        raise unknown
    if not is_own(acting(command)):
        raise disguised(unknown, f"hold {hold_id} belongs to {acting(command)}")
    return command.worker_id
