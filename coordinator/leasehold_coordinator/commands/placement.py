"""Chooses the worker of a new workload: describes the fleet to the planner."""

from collections.abc import Container, Iterable, Iterator
from heapq import heapify, heappop
from typing import Final

from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest

from leasehold_coordinator.core.client_views import gpu_slots
from leasehold_coordinator.core.gpu_conditions import seen_state, state_without_lease
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.operation_rules import named_gpus
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.scheduling.candidates import Candidate, CandidateGpu, least_gpus
from leasehold_coordinator.scheduling.planner import check_named_gpus, choose_worker
from leasehold_coordinator.scheduling.shortages import Shortage, shortage_at_a_glance

EXPLAINED_LIMIT: Final = 16
"""Workers with too little room that a refusal looks at in full. Of all others it knows the reason alone."""


def place(
    fleet: FleetReader, request: CreateWorkloadRequest, among: Container[str] | None = None
) -> Candidate:
    """The worker for a new workload.

    Args:
        fleet: The fleet.
        request: The request.
        among: Ids of the eligible workers. None: all workers.

    Raises:
        FleetError: UNKNOWN_WORKER, WORKER_UNAVAILABLE, or a refusal of the planner.
    """
    spec = request.spec
    named_uuids = request.gpu_uuids or spec.resources.gpu_uuids
    if request.worker:
        named = fleet.registry.find(request.worker)
        fleet.contact(named.hello.worker_id)
        if request.gpu_uuids or not any(fleet.registry.owner(uuid) is named for uuid in named_uuids):
            field = "gpu_uuids" if request.gpu_uuids else "spec.resources.gpu_uuids"
            _check_owners(fleet, named, named_uuids, field)
        wanted: Iterable[KnownWorker] = [named]
    elif named_uuids:
        found = (fleet.registry.owner(uuid) for uuid in named_uuids)
        owners = {known.hello.worker_id: known for known in found if known is not None}
        away = [worker_id for worker_id in owners if not fleet.is_in_contact(worker_id)]
        if away and (request.gpu_uuids or len(away) == len(owners)):
            fleet.contact(away[0])
        wanted = owners.values()
    else:
        wanted = _most_open_first(fleet)
    wanted = (
        known
        for known in wanted
        if fleet.is_in_contact(known.hello.worker_id) and (among is None or known.hello.worker_id in among)
    )
    if request.gpu_uuids:
        candidates = [_candidate(fleet, known, for_helper=spec.HasField("helper")) for known in wanted]
        return check_named_gpus(candidates, list(request.gpu_uuids), spec.resources)
    others: list[Shortage] = []
    return choose_worker(_described(fleet, wanted, spec, others), spec.resources, others)


def _check_owners(fleet: FleetReader, named: KnownWorker, gpu_uuids: Iterable[str], field: str) -> None:
    """Checks that no other worker has one of the named GPUs.

    Raises:
        FleetError: UNKNOWN_GPU.
    """
    for uuid in gpu_uuids:
        owner = fleet.registry.owner(uuid)
        if owner is not None and owner is not named:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                f"{uuid} belongs to worker {owner.hello.name}, and the request names worker "
                f"{named.hello.name}: name GPUs of that worker, or leave out the worker",
                field=field,
            )


def _described(
    fleet: FleetReader, wanted: Iterable[KnownWorker], spec: WorkloadSpec, others: list[Shortage]
) -> Iterator[Candidate]:
    """Describes workers for the planner. Most of those with too little room are added to ``others`` instead.

    A glance at a worker costs a fraction of its description.
    """
    left_to_explain = EXPLAINED_LIMIT
    for known in wanted:
        if (shortage := _glance(fleet, known, spec.resources)) is not None:
            if not left_to_explain:
                others.append(shortage)
                continue
            left_to_explain -= 1
        yield _candidate(fleet, known, for_helper=spec.HasField("helper"))


def _glance(fleet: FleetReader, known: KnownWorker, resources: Resources) -> Shortage | None:
    open_gpus = known.open_gpus
    if open_gpus < least_gpus(resources) <= len(known.leases):
        leased = (lease for lease in known.leases if lease.state == lease_pb2.SLOT_STATE_LEASED)
        open_gpus += sum(_is_lent(fleet, lease) for lease in leased)
    gpus = known.hello.gpus if known.reported else ()
    return shortage_at_a_glance(known.hello.name, known.cordon, gpus, open_gpus, known.resources, resources)


def _most_open_first(fleet: FleetReader) -> Iterator[KnownWorker]:
    """Every worker: most open GPUs first, then by name and id."""
    order = [(-known.open_gpus, known.hello.name, known.hello.worker_id) for known in fleet.registry]
    heapify(order)
    while order:
        known = fleet.registry.get(heappop(order)[2])
        if known is not None:
            yield known


def _candidate(fleet: FleetReader, known: KnownWorker, *, for_helper: bool) -> Candidate:
    worker_id = known.hello.worker_id
    commands = [stored.command for stored in fleet.ledger.of_worker(worker_id)]
    awaited = {uuid for command in commands for uuid in named_gpus(command.operation)}
    return Candidate(
        worker_id,
        known.hello.name,
        {
            gpu.uuid: CandidateGpu(
                gpu,
                seen_state(lease),
                lease,
                awaited=gpu.uuid in awaited,
                lent=not for_helper and _is_lent(fleet, lease),
            )
            for gpu, lease in gpu_slots(known)
        },
        sum(_promised(fleet, known, command) for command in commands),
        known.cordon,
        known.resources,
        known.open_gpus,
    )


def _is_lent(fleet: FleetReader, lease: GpuLease) -> bool:
    """Whether a preemptible workload leases a GPU that is otherwise free."""
    holder = fleet.workloads.get(lease.workload_id)
    is_helper = holder is not None and holder.spec.HasField("helper")
    return is_helper and state_without_lease(lease) == lease_pb2.SLOT_STATE_FREE


def _promised(fleet: FleetReader, known: KnownWorker, command: Command) -> int:
    """Number of free GPUs that an unfinished command may still take without naming them."""
    for operation in (command.operation.run, command.operation.restore):
        if operation.hold_id or operation.preempt:
            return 0  # their GPUs are reserved or leased, and not free
    settled = max(known.held_gpus(command.workload_id), len(named_gpus(command.operation)))
    return max(0, _wanted_gpus(fleet, command) - settled)


def _wanted_gpus(fleet: FleetReader, command: Command) -> int:
    if command.operation.HasField("run"):
        return least_gpus(command.operation.run.spec.resources)
    workload = fleet.workloads.get(command.workload_id)
    if command.operation.HasField("restore") and workload is not None:
        # A stopped workload is started again, and has no previous GPUs to return to.
        return len(workload.status.parked_gpu_uuids) or least_gpus(workload.spec.resources)
    return 0
