"""Why a worker can't take a workload, in words that name what it has and who holds it. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.lease_pb2 import Cordon, GpuLease, SlotState
from leasehold.v1.machine_pb2 import MachineResources
from leasehold.v1.workload_pb2 import Resources

from leasehold_coordinator.candidates import Candidate, CandidateGpu, least_gpus, suits

LISTED_LIMIT: Final = 5
"""Workers that a refusal names: it travels in the trailers of a call, which hold 8 KiB."""

TEXT_LIMIT: Final = 60
"""Characters of somebody's words that a refusal repeats."""

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
    """What a worker lacks for a workload.

    Attributes:
        worker: Its name.
        reason: NO_FREE_GPU, CORDONED or INSUFFICIENT_RESOURCES.
        why: In words.
        for_good: It would lack it also if nobody had anything of it.
    """

    worker: str
    reason: ErrorReason.ValueType
    why: str
    for_good: bool = False


def shortage_of(candidate: Candidate, resources: Resources) -> Shortage | None:
    """The first thing that a worker lacks for a workload. None: nothing that is known here."""
    if candidate.cordon is not None:
        why = f"is cordoned{cordon_text(candidate.cordon)}"
        return Shortage(candidate.name, errors_pb2.ERROR_REASON_CORDONED, why)
    least = least_gpus(resources)
    units = candidate.units(resources) if resources.gpu_units else None
    too_few = least > 0 and candidate.room(resources) < least
    too_small = units is not None and units < resources.gpu_units
    if too_few or too_small:
        why = _gpus_text(candidate, resources) + (f", {units} units free" if too_small else "")
        for_good = len(candidate.suitable(resources)) < least
        return Shortage(candidate.name, errors_pb2.ERROR_REASON_NO_FREE_GPU, why, for_good)
    if candidate.machine is not None and (lacks := list(_machine_lacks(candidate.machine, resources))):
        reason = errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
        return Shortage(candidate.name, reason, ", ".join(lacks), _is_too_small(candidate.machine, resources))
    return None


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
    """What is wanted, as the beginning of a sentence."""
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
    is_one = parts == [gpus(1)]
    return f"{', '.join(parts) or 'a worker'} {'is' if is_one or not parts else 'are'} wanted"


def gpus(count: int) -> str:
    """A number of GPUs."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def cordon_text(cordon: Cordon) -> str:
    """Why and by whom, in brackets; empty where nobody said."""
    parts = [cordon.reason[:TEXT_LIMIT]] if cordon.reason else []
    parts += [f"by {cordon.cordoned_by[:TEXT_LIMIT]}"] if cordon.cordoned_by else []
    return f" ({', '.join(parts)})" if parts else ""


def foreign_text(lease: GpuLease) -> str:
    """The processes on a GPU that belong to no workload; the first few, where there are many."""
    texts = []
    for process in lease.foreign_processes:
        user = f" of {process.user[:TEXT_LIMIT]}" if process.user else ""
        command = f" ({process.command[:TEXT_LIMIT]})" if process.command else ""
        texts.append(f"pid {process.pid}{user}{command}")
    return listed(texts, ", ") or "a process that Leasehold doesn't know"


def listed(texts: Sequence[str], between: str = "; ") -> str:
    """The first few texts, and how many more there are."""
    more = len(texts) - LISTED_LIMIT
    return between.join([*texts[:LISTED_LIMIT], *([f"and {more} more"] if more > 0 else [])])


def size(count_bytes: int) -> str:
    """Bytes for people."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
