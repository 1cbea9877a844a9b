"""The reasons why a worker can't take a workload, in words. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Cordon, SlotState
from leasehold.v1.worker_pb2 import MachineResources
from leasehold.v1.workload_pb2 import Resources

from leasehold_coordinator.core.gpu_texts import TEXT_LIMIT, cordon_text, gpus, size
from leasehold_coordinator.scheduling.candidates import Candidate, CandidateGpu, least_gpus, suits

_STATES: Final[dict[SlotState.ValueType, str]] = {
    lease_pb2.SLOT_STATE_FREE: "free",
    lease_pb2.SLOT_STATE_LEASED: "leased",
    lease_pb2.SLOT_STATE_RESERVED: "reserved",
    lease_pb2.SLOT_STATE_CORDONED: "cordoned",
    lease_pb2.SLOT_STATE_UNHEALTHY: "unhealthy",
    lease_pb2.SLOT_STATE_FOREIGN: "with foreign processes",
}


@dataclass(frozen=True, slots=True)
class Shortage:
    """The resources that a worker lacks for a workload.

    Attributes:
        worker: The worker's name.
        reason: NO_FREE_GPU, CORDONED or INSUFFICIENT_RESOURCES.
        why: The shortage in words.
        for_good: The worker is too small even when it is idle.
        states: The states of its GPUs. Empty: another shortage, or one at a glance.
    """

    worker: str
    reason: ErrorReason.ValueType
    why: str
    for_good: bool = False
    states: frozenset[SlotState.ValueType] = frozenset()


def shortage_of(candidate: Candidate, resources: Resources) -> Shortage | None:
    """The first shortage of a worker for a workload. None: the coordinator knows of no shortage."""
    if candidate.cordon is not None:
        why = f"is cordoned{cordon_text(candidate.cordon)}"
        return Shortage(candidate.name, errors_pb2.ERROR_REASON_CORDONED, why)
    least = least_gpus(resources)
    units = candidate.units(resources) if resources.gpu_units else None
    too_few = least > 0 and candidate.room(resources) < least
    too_small = units is not None and units < resources.gpu_units
    if too_few or too_small:
        why = _gpus_text(candidate, resources) + (f", {units} units free" if too_small else "")
        known = [one.gpu for one in candidate.gpus.values()]
        for_good = _suitable(known, resources) < least or _has_too_few_units(known, resources)
        states = frozenset(one.state for one in candidate.gpus.values() if suits(one.gpu, resources))
        return Shortage(candidate.name, errors_pb2.ERROR_REASON_NO_FREE_GPU, why, for_good, states)
    if candidate.machine is not None and (lacks := list(_machine_lacks(candidate.machine, resources))):
        reason = errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
        return Shortage(candidate.name, reason, ", ".join(lacks), _is_too_small(candidate.machine, resources))
    return None


def shortage_at_a_glance(
    worker: str,
    cordon: Cordon | None,
    gpus: Sequence[Gpu],
    open_gpus: int,
    machine: MachineResources | None,
    resources: Resources,
) -> Shortage | None:
    """A shortage of a worker, without words. None: only :func:`shortage_of` can tell.

    Args:
        worker: The worker's name.
        cordon: The cordon of the worker. None: not cordoned.
        gpus: Its GPUs.
        open_gpus: Most of them that a workload may get, of whatever kind.
        machine: Total and free resources of its host. None: unknown.
        resources: The requested resources.
    """
    if cordon is not None:
        return Shortage(worker, errors_pb2.ERROR_REASON_CORDONED, "")
    least = least_gpus(resources)
    if least:
        suitable = _suitable(gpus, resources)
        units = _most_units(gpus, open_gpus, resources) if resources.gpu_units else None
        if min(open_gpus, suitable) < least or (units is not None and units < resources.gpu_units):
            for_good = suitable < least or _has_too_few_units(gpus, resources)
            return Shortage(worker, errors_pb2.ERROR_REASON_NO_FREE_GPU, "", for_good)
    if machine is not None and any(_machine_lacks(machine, resources)):
        for_good = _is_too_small(machine, resources)
        return Shortage(worker, errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES, "", for_good)
    return None


def _suitable(gpus: Sequence[Gpu], resources: Resources) -> int:
    """Number of GPUs that match the request. Most requests match every GPU, so that none is looked at."""
    is_particular = (
        resources.gpu_name
        or resources.gpu_memory_bytes
        or resources.gpu_uuids
        or resources.acceptable_gpu_units
    )
    return sum(suits(gpu, resources) for gpu in gpus) if is_particular else len(gpus)


def _has_too_few_units(gpus: Sequence[Gpu], resources: Resources) -> bool:
    """Whether these GPUs have fewer units than the request even when all are free."""
    units = _most_units(gpus, len(gpus), resources) if resources.gpu_units else None
    return units is not None and units < resources.gpu_units


def _most_units(gpus: Sequence[Gpu], open_gpus: int, resources: Resources) -> int | None:
    """Most units that a worker has for a workload, free or not. None: a matching GPU has no units."""
    units = [gpu.units for gpu in gpus if suits(gpu, resources)]
    if not all(units):
        return None
    return sum(sorted(units, reverse=True)[: resources.gpu_count or open_gpus])


def _gpus_text(candidate: Candidate, resources: Resources) -> str:
    if not candidate.gpus:
        return "no GPU"
    counts = Counter(_standing(one, resources) for one in candidate.gpus.values())
    parts = [gpus(len(candidate.gpus))]
    parts += [f"{counts[word]} {word}" for word in (*_STATES.values(), *_OTHERS) if counts[word]]
    if candidate.promised:
        parts.append(f"{candidate.promised} promised to commands under way")
    return ", ".join(parts)


_UNSUITABLE: Final = "of another kind"
_AWAITED: Final = "awaited by a command under way"
_CROWDED: Final = "with too little memory beside sleeping workloads"
_OTHERS: Final = (_AWAITED, _CROWDED, _UNSUITABLE, "unknown")


def _standing(one: CandidateGpu, resources: Resources) -> str:
    if not suits(one.gpu, resources):
        return _UNSUITABLE
    if one.awaited and one.state == lease_pb2.SLOT_STATE_FREE:
        return _AWAITED
    if one.state == lease_pb2.SLOT_STATE_FREE and one.is_crowded_for(resources):
        return _CROWDED
    return _STATES.get(one.state, "unknown")


def _machine_lacks(machine: MachineResources, resources: Resources) -> Iterator[str]:
    if resources.cpu_millicores > machine.cpu_millicores_free:
        yield f"{machine.cpu_millicores_free / 1000:g} of {machine.cpu_millicores_total / 1000:g} cores free"
    if resources.memory_bytes > machine.memory_free_bytes:
        yield f"{size(machine.memory_free_bytes)} of {size(machine.memory_total_bytes)} memory free"
    if resources.disk_bytes > machine.disk_free_bytes:
        yield f"{size(machine.disk_free_bytes)} of {size(machine.disk_total_bytes)} disk free"


def _is_too_small(machine: MachineResources, resources: Resources) -> bool:
    return (
        resources.cpu_millicores > machine.cpu_millicores_total
        or resources.memory_bytes > machine.memory_total_bytes
        or resources.disk_bytes > machine.disk_total_bytes
    )


def wanted_text(resources: Resources) -> str:
    """The request in words, as the beginning of a message."""
    parts = []
    if resources.gpu_count:
        parts.append(gpus(resources.gpu_count))
    if resources.gpu_units:
        parts.append(f"GPUs of {resources.gpu_units} units" if not parts else f"{resources.gpu_units} units")
    if resources.gpu_name:
        parts.append(resources.gpu_name[:TEXT_LIMIT])
    if resources.gpu_memory_bytes:
        parts.append(f"{size(resources.gpu_memory_bytes)} each")
    if resources.cpu_millicores:
        parts.append(f"{resources.cpu_millicores / 1000:g} cores")
    if resources.memory_bytes:
        parts.append(f"{size(resources.memory_bytes)} memory")
    if resources.disk_bytes:
        parts.append(f"{size(resources.disk_bytes)} disk")
    return f"requested {', '.join(parts) or 'a worker'}"
