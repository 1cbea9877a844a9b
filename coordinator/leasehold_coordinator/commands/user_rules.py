"""Rules that bind users and not operators: priorities, and GPUs by name."""

from collections.abc import Collection
from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec

from leasehold_coordinator.commands.targets import Target
from leasehold_coordinator.core.operation_rules import named_gpus
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.permissions import is_operator

USER_PRIORITY_LIMIT: Final = 0
"""Default of the highest priority of users' workloads."""


def check_priority(spec: WorkloadSpec, limit: int) -> None:
    """Refuses a priority that only operators give.

    Raises:
        FleetError: NOT_PERMITTED.
    """
    if spec.priority > limit and not is_operator():
        raise FleetError(
            errors_pb2.ERROR_REASON_NOT_PERMITTED,
            f"priority {spec.priority} is for operators: users give at most {limit} (user_priority_limit)",
            field="spec.priority",
        )


def taken_gpus(target: Target) -> set[str]:
    """UUIDs of the GPUs that an operation names, and that its workloads don't lease."""
    held = {uuid for workload in target.workloads for uuid in workload.status.lease.gpu_uuids}
    return named_gpus(target.operation) - held


def check_queue(fleet: FleetReader, worker_id: str, gpu_uuids: Collection[str]) -> None:
    """Refuses to take GPUs by name while claims wait, since named GPUs go ahead of them.

    Raises:
        FleetError: NOT_PERMITTED.
    """
    known = fleet.registry.get(worker_id)
    if not gpu_uuids or is_operator() or known is None or not known.load.pending_claimers:
        return
    raise FleetError(
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        f"{known.load.pending_claimers} claims wait for GPUs of worker {known.hello.name}, and only "
        "operators take GPUs by name ahead of them: name no GPUs, or try again later",
        field="gpu_uuids",
    )
