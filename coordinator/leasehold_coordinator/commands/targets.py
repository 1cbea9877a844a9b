"""Resolves the names of workloads in a request to ids."""

from dataclasses import dataclass
from typing import final

from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.operation_rules import check_operation
from leasehold_coordinator.errors import invalid
from leasehold_coordinator.fleet.fleet_reader import FleetReader


@final
@dataclass(frozen=True, slots=True)
class Target:
    """An operation and its workloads, as they were at the time of the request.

    Attributes:
        operation: The operation, with ids in place of names.
        workloads: At least one workload, each once. A remap's are in the order of its moves.
    """

    operation: Operation
    workloads: tuple[Workload, ...]

    @property
    def first(self) -> Workload:
        """The workload of the command record. ``expected_generation`` refers to this workload."""
        return self.workloads[0]

    @property
    def workload_ids(self) -> list[str]:
        """Ids of all workloads."""
        return [workload.workload_id for workload in self.workloads]


async def find_target(fleet: FleetReader, workload: str, operation: Operation) -> Target:
    """Finds the workloads of an operation.

    Args:
        fleet: The fleet.
        workload: Id or name. Ignored for a remap: its moves name the workloads.
        operation: The requested operation, which is not changed.

    Raises:
        FleetError: UNKNOWN_WORKLOAD, or INVALID_ARGUMENT for an invalid operation.
    """
    check_operation(operation)
    resolved = Operation()
    resolved.CopyFrom(operation)
    if not operation.HasField("remap"):
        return Target(resolved, (await fleet.find_workload(workload),))
    workloads = [await fleet.find_workload(move.workload_id) for move in operation.remap.moves]
    seen: set[str] = set()
    for index, (move, found) in enumerate(zip(resolved.remap.moves, workloads, strict=True)):
        if found.workload_id in seen:
            raise invalid(
                f"operation.moves[{index}].workload_id",
                f"workload {found.name} has two moves: put all its pairs into one",
            )
        seen.add(found.workload_id)
        move.workload_id = found.workload_id
    return Target(resolved, tuple(workloads))
