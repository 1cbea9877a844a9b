"""Whether the pool, the ledger, NVML and the coordinator of one shared host say the same."""

import time
from collections.abc import Iterator

from leasehold.local.v1.local_service_pb2 import ListResponse
from leasehold.v1 import gpu_pb2, lease_pb2
from leasehold.v1.gpu_pb2 import GpuHealth
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Workload, WorkloadState
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_worker.host.processes import ProcessIdentity, identify, lineage

from .shared_host import SharedHost

AGREE_TIMEOUT_S = 40.0
"""How long they may take: the view of foreign processes is 5 s old at most, a claim is waited for 30 s."""


def wait_agreed(shared: SharedHost, client: Client) -> None:
    """Waits until all agree.

    Raises:
        AssertionError: They don't in time; it says where.
    """
    deadline = time.monotonic() + AGREE_TIMEOUT_S
    while True:
        try:
            wrong = list(disagreements(shared, client))
        except LeaseholdError as error:
            wrong = [error.message]
        if not wrong:
            return
        if time.monotonic() > deadline:
            raise AssertionError("; ".join(wrong))
        time.sleep(0.05)


def disagreements(shared: SharedHost, client: Client) -> Iterator[str]:
    """Everything that does not fit together, in words."""
    local = shared.look()
    workloads = {workload.workload_id: workload for workload in local.workloads}
    yield from _of_leases(local, workloads)
    yield from _of_ledger(local)
    yield from _of_nvml(shared, local, workloads)
    yield from _of_queue(local)
    yield from _of_coordinator(local, client)
    yield from _of_holders(shared, local)
    yield from _of_standing(shared, local)


def _of_leases(local: ListResponse, workloads: dict[str, Workload]) -> Iterator[str]:
    held: dict[str, str] = {}
    for workload in workloads.values():
        for uuid in workload.status.lease.gpu_uuids:
            if uuid in held:
                yield f"{uuid} is leased to {held[uuid]} and to {workload.name}"
            held[uuid] = workload.workload_id
        if identify(workload.status.root_pid) is None:
            yield f"{workload.name} is live and its process is not"
    for slot in local.gpus:
        if slot.workload_id != held.get(slot.gpu_uuid, ""):
            yield f"slot {slot.slot} is of {slot.workload_id or 'nobody'}, and its workload says otherwise"
        if slot.state == lease_pb2.SLOT_STATE_RESERVED:
            yield f"slot {slot.slot} is reserved, and nothing is under way"


def _of_ledger(local: ListResponse) -> Iterator[str]:
    promised = sum(workload.spec.resources.cpu_millicores for workload in local.workloads)
    taken = local.resources.cpu_millicores_total - local.resources.cpu_millicores_free
    if promised != taken:
        yield f"workloads were promised {promised} millicores, and the ledger counts {taken}"
    free = sum(slot.state == lease_pb2.SLOT_STATE_FREE for slot in local.gpus)
    if free != local.resources.gpu_count_free:
        yield f"{free} slots are free, and the resources say {local.resources.gpu_count_free}"


def _of_nvml(shared: SharedHost, local: ListResponse, workloads: dict[str, Workload]) -> Iterator[str]:
    slots = {slot.gpu_uuid: slot for slot in local.gpus}
    roots = {workload.status.root_pid: workload for workload in workloads.values()}
    for process in shared.host.processes():
        holder = next((roots[one.pid] for one, _ in _lineage(process.pid) if one.pid in roots), None)
        for uuid in process.gpu_bytes if process.resident else ():
            slot = slots[uuid]
            foreign = {listed.pid for listed in slot.foreign_processes}
            if holder is None and process.pid not in foreign:
                yield f"process {process.pid} on slot {slot.slot} is nobody's, and the slot does not say so"
            if holder is not None and slot.workload_id != holder.workload_id:
                yield f"{holder.name} is on slot {slot.slot}, which it does not lease"
            if slot.state == lease_pb2.SLOT_STATE_FREE:
                yield f"slot {slot.slot} is free, and process {process.pid} is on it"
    pids = {process.pid for process in shared.host.processes() if process.resident}
    for slot in local.gpus:
        for listed in slot.foreign_processes:
            if listed.pid not in pids:
                yield f"slot {slot.slot} names process {listed.pid}, which is on no GPU"


def _lineage(pid: int) -> list[tuple[ProcessIdentity, int]]:
    return list(lineage(pid))


def _of_queue(local: ListResponse) -> Iterator[str]:
    free = sum(slot.state == lease_pb2.SLOT_STATE_FREE for slot in local.gpus)
    if local.waiting and free >= local.waiting[0].gpu_count and not local.HasField("cordon"):
        yield f"{local.waiting[0].name} waits for {local.waiting[0].gpu_count} GPUs while {free} are free"


def _of_coordinator(local: ListResponse, client: Client) -> Iterator[str]:
    known = {gpu.gpu.uuid: gpu for gpu in client.gpus()}
    for slot in local.gpus:
        theirs = known.get(slot.gpu_uuid, FleetGpu())
        ours_text, theirs_text = _slot_text(slot), _slot_text(theirs.lease)
        if ours_text != theirs_text:
            yield f"slot {slot.slot} is {ours_text}, and for the coordinator {theirs_text}"
    ours = {workload.workload_id: workload.status.state for workload in local.workloads}
    its = {workload.workload_id: workload.status.state for workload in client.workloads()}
    for workload_id in ours.keys() | its.keys():
        if ours.get(workload_id) != its.get(workload_id):
            names = [
                WorkloadState.Name(state) if state else "not there"
                for state in (ours.get(workload_id), its.get(workload_id))
            ]
            yield f"workload {workload_id} is {names[0]}, and for the coordinator {names[1]}"


def _slot_text(slot: lease_pb2.GpuLease) -> str:
    state, health = SlotState.Name(slot.state)[11:], GpuHealth.Name(slot.health)[11:]
    cordon = " cordoned" if slot.HasField("cordon") else ""
    return f"{state} of {slot.workload_id or 'nobody'}, {health}{cordon}"


def _of_holders(shared: SharedHost, local: ListResponse) -> Iterator[str]:
    """Everybody who lives and asked for GPUs is known: as a workload, or as one who waits."""
    known = {workload.name for workload in local.workloads} | {claim.name for claim in local.waiting}
    for holder in shared.living("exec", "helper"):
        if holder.name not in known:
            yield f"{holder.name} lives, and the worker knows nothing of it"


def _of_standing(shared: SharedHost, local: ListResponse) -> Iterator[str]:
    """What is held against GPUs is what happened to them, whatever happened to the worker."""
    cordoned = {slot.gpu_uuid for slot in local.gpus if slot.HasField("cordon")}
    sick = {slot.gpu_uuid for slot in local.gpus if slot.health != gpu_pb2.GPU_HEALTH_OK}
    if cordoned != shared.cordoned:
        yield f"cordoned are {sorted(cordoned)}, and should be {sorted(shared.cordoned)}"
    if sick != shared.sick:
        yield f"sick are {sorted(sick)}, and should be {sorted(shared.sick)}"
