"""What frames of a worker may name: its own GPUs, workloads and commands. Nothing else is believed."""

from collections.abc import Container, Iterable

from leasehold.v1 import errors_pb2
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.fleet_reader import FleetReader


def check_leases(
    reader: FleetReader, worker_id: str, leases: Iterable[GpuLease], *, claimed: Container[str] = ()
) -> None:
    """Refuses leases of GPUs of other workers, and leases that workloads of other workers hold.

    Args:
        reader: What is known.
        worker_id: The worker.
        leases: The reported leases.
        claimed: UUIDs of GPUs that the worker takes over from workers that are gone.

    Raises:
        FleetError: PROTOCOL_VIOLATION.
    """
    for lease in leases:
        owner = reader.registry.owner(lease.gpu_uuid)
        is_taken = owner is not None and owner.hello.worker_id != worker_id
        if is_taken and lease.gpu_uuid not in claimed:
            raise _violation("gpu_leases.gpu_uuid", f"GPU {lease.gpu_uuid} belongs to another worker")
        holder = reader.workloads.get(lease.workload_id) if lease.workload_id else None
        if holder is not None:
            check_workload_of(holder, worker_id)


def check_workload_of(workload: Workload, worker_id: str) -> None:
    """Refuses a report about a workload of another worker.

    Raises:
        FleetError: PROTOCOL_VIOLATION.
    """
    if workload.worker_id != worker_id:
        raise _violation("workload_id", f"workload {workload.workload_id} is on another worker")


def check_command_of(stored: StoredCommand, worker_id: str) -> None:
    """Refuses an update of a command of another worker.

    Raises:
        FleetError: PROTOCOL_VIOLATION.
    """
    if stored.command.worker_id != worker_id:
        raise _violation("command_id", f"command {stored.command.command_id} is for another worker")


def _violation(field: str, what: str) -> FleetError:
    return FleetError(
        errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
        f"{what}, and a worker reports only its own: give each worker a state directory of its own, not a "
        "copy",
        field=field,
    )
