"""Holds: GPUs that a suspend freed, reserved on its worker for the run or restore that names the hold.

A run or a restore that preempts makes a hold of its own on the worker.
"""

from dataclasses import dataclass
from typing import final

from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest

from leasehold_coordinator.commands.targets import find_hold_worker, find_preempted
from leasehold_coordinator.core.operation_rules import check_preempt
from leasehold_coordinator.errors import invalid
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.scheduling.candidates import least_gpus


@final
@dataclass(frozen=True, slots=True)
class Room:
    """The GPUs that a new workload gets from a hold, or from workloads that it preempts.

    Attributes:
        worker_id: Its worker, which alone knows what is free. Empty: the request names no such GPUs.
        preempted_ids: Ids of the workloads that are suspended first.
        owners: Their owners.
    """

    worker_id: str = ""
    preempted_ids: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()


async def find_room(fleet: FleetReader, request: CreateWorkloadRequest) -> Room:
    """The hold or the preempted workloads of a request.

    Raises:
        FleetError: UNKNOWN_HOLD, UNKNOWN_WORKLOAD, WRONG_STATE or WORKER_UNAVAILABLE; INVALID_ARGUMENT if
            they are on another worker than the request names, or it takes no GPU.
    """
    check_preempt("preempt", request.preempt, request.hold_id)
    preempted = await find_preempted(fleet, "preempt", request.preempt)
    if preempted and not request.gpu_uuids and not least_gpus(request.spec.resources):
        raise invalid(
            "preempt", "a workload without GPUs needs none of others: ask for GPUs, or leave it out"
        )
    if not preempted and not request.hold_id:
        return Room()
    worker_id = preempted[0].worker_id if preempted else await find_hold_worker(fleet, request.hold_id)
    if request.worker and fleet.registry.find(request.worker).hello.worker_id != worker_id:
        what = f"workload {preempted[0].name}" if preempted else f"hold {request.hold_id}"
        raise invalid("worker", f"{what} is not on worker {request.worker}: leave out the worker")
    fleet.contact(worker_id)
    ids, owners = ([one.workload_id for one in preempted], [one.owner for one in preempted])
    return Room(worker_id, tuple(ids), tuple(owners))
