"""Which workloads a request is about: names become ids."""

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
    """An operation and the workloads that it is about, as they were when it was asked for.

    Attributes:
        operation: The operation, with ids where the request may have had names.
        workloads: At least one, each once: in the order of a remap's moves.
    """

    operation: Operation
    workloads: tuple[Workload, ...]

    @property
    def first(self) -> Workload:
        """The workload that the command is listed under, and that expected_generation is about."""
        return self.workloads[0]

    @property
    def workload_ids(self) -> list[str]:
        """Ids of all of them."""
        return [workload.workload_id for workload in self.workloads]


async def find_target(fleet: FleetReader, workload: str, operation: Operation) -> Target:
    """Finds what an operation is about.

    Args:
        fleet: What is known.
        workload: Id or name; empty for a remap, whose moves name theirs.
        operation: What is asked for. It is not changed.

    Raises:
        FleetError: UNKNOWN_WORKLOAD, or INVALID_ARGUMENT where the operation breaks a rule by itself.
    """
    check_operation(operation)
    resolved = Operation()
    resolved.CopyFrom(operation)
    if not operation.HasField("remap"):
        return Target(resolved, (await fleet.find_workload(workload),))
    workloads = [await fleet.find_workload(move.workload_id) for move in operation.remap.moves]
    seen: set[str] = set()
    for move, found in zip(resolved.remap.moves, workloads, strict=True):
        if found.workload_id in seen:
            raise invalid(
                "operation.moves.workload_id",
                f"workload {found.name} has two moves: put all its pairs into one",
            )
        seen.add(found.workload_id)
        move.workload_id = found.workload_id
    return Target(resolved, tuple(workloads))
