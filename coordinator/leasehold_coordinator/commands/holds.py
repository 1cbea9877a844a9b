"""Holds: GPUs that a suspend freed, reserved on its worker for the run or restore that names the hold."""

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest

from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.fleet import Fleet


async def find_hold_worker(fleet: Fleet, hold_id: str) -> str:
    """The id of the worker on which a hold was made, whether or not the hold still exists.

    A hold has the id of the suspend's command, which names the worker. The worker's last load may be older
    than the hold.

    Raises:
        FleetError: UNKNOWN_HOLD, or STORAGE_UNAVAILABLE.
    """
    command = await fleet.find_command(hold_id)
    if command is None or not command.operation.suspend.HasField("hold_for"):
        raise FleetError(
            errors_pb2.ERROR_REASON_UNKNOWN_HOLD,
            f"there is no hold {hold_id!r}: give the hold_id of the result of a suspend with hold_for",
            field="hold_id",
        )
    return command.worker_id


async def place_on_hold(fleet: Fleet, request: CreateWorkloadRequest) -> str:
    """The id of the worker for a new workload that takes a hold. The worker alone knows what is free there.

    Raises:
        FleetError: UNKNOWN_HOLD or WORKER_UNAVAILABLE; INVALID_ARGUMENT if the request names another worker.
    """
    worker_id = await find_hold_worker(fleet, request.hold_id)
    if request.worker and fleet.registry.find(request.worker).hello.worker_id != worker_id:
        raise invalid(
            "worker",
            f"hold {request.hold_id} is on another worker than {request.worker}: leave out the worker",
        )
    fleet.contact(worker_id)
    return worker_id
