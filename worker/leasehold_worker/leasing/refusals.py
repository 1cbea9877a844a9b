"""Refusals of GPUs, with a message and a typed reason. Pure."""

from collections.abc import Collection, Sequence
from typing import Final

from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.lease_pb2 import SlotState

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.leases import (
    CORDONED,
    FOREIGN,
    FREE,
    LEASED,
    RESERVED,
    UNHEALTHY,
    Cordon,
    SlotLease,
)

ITSELF: Final = "itself"
"""The operator of the cordon of a stopping worker, which nobody can end."""

_REASONS: Final = {
    FOREIGN: errors_pb2.ERROR_REASON_FOREIGN_PROCESS,
    UNHEALTHY: errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
    CORDONED: errors_pb2.ERROR_REASON_CORDONED,
}


_WAYS: Final = {
    LEASED: "suspend or stop a workload",
    RESERVED: "wait for a reserved GPU or name its hold",
    CORDONED: "uncordon a GPU",
    UNHEALTHY: "repair a GPU and reset its health",
    FOREIGN: "end or adopt a foreign process",
}


def ways_to_free(states: Collection[SlotState.ValueType]) -> list[str]:
    """The ways to free GPUs in these states."""
    return [way for state, way in _WAYS.items() if state in states] or [_WAYS[LEASED]]


def not_enough(request: GpuRequest, fitting: Sequence[SlotLease], pending_claimers: int) -> OperationError:
    """The refusal of a request that can't be granted now.

    Args:
        request: The request.
        fitting: The slots with a matching GPU.
        pending_claimers: Number of waiting claims.
    """
    states = [slot.state for slot in fitting]
    missing = request.count - _usable(request, fitting)
    reason = errors_pb2.ERROR_REASON_NO_FREE_GPU
    for state, its_reason in _REASONS.items():
        if state not in _usable_states(request) and 0 < missing <= states.count(state):
            reason = its_reason
    ways = ways_to_free(set(states) - set(_usable_states(request)))
    due = ""
    if pending_claimers:
        due = "; 1 claim waits" if pending_claimers == 1 else f"; {pending_claimers} claims wait"
    return OperationError(
        reason,
        f"{shortage(request, fitting)}{due}: {', '.join(ways)}, or wait",
        {"field": "gpu_count"},
    )


def shortage(request: GpuRequest, fitting: Sequence[SlotLease]) -> str:
    """The requested and the available GPUs, as text.

    Args:
        request: The request.
        fitting: The slots with a matching GPU.
    """
    states = [slot.state for slot in fitting]
    others = ", ".join(
        f"{states.count(state)} {_state_name(state)}"
        for state in (LEASED, RESERVED, CORDONED, UNHEALTHY, FOREIGN)
        if state in states and state not in _usable_states(request)
    )
    open_slots = [slot for slot in fitting if slot.state in _usable_states(request)]
    crowded = sum(not slot.has_memory_for(request) for slot in open_slots)
    if crowded:
        others = f"{others}, " if others else ""
        others += f"{crowded} with too little memory beside sleeping workloads"
    usable = _usable(request, fitting)
    kept = ", reserved for earlier claims" if usable >= request.count and not request.units else ""
    held = f" ({others})" if others else ""
    return f"{wanted(request)} needed: {len(fitting)} match, {usable} free{kept}{held}"


def _usable(request: GpuRequest, fitting: Sequence[SlotLease]) -> int:
    usable = _usable_states(request)
    return sum(slot.state in usable and slot.has_memory_for(request) for slot in fitting)


def _usable_states(request: GpuRequest) -> tuple[SlotState.ValueType, ...]:
    return (FREE, FOREIGN) if request.allow_foreign else (FREE,)


def cordoned(
    what: str,
    cordon: Cordon,
    metadata: dict[str, str] | None = None,
    remedy: str = "choose another, or uncordon it",
) -> OperationError:
    """The refusal of a cordoned GPU or worker."""
    if cordon.cordoned_by == ITSELF:
        remedy = "choose another, or wait for its next start"
    return OperationError(
        errors_pb2.ERROR_REASON_CORDONED,
        f"{what} is cordoned by {cordon.cordoned_by or 'somebody'} ({cordon.reason}): {remedy}",
        metadata,
    )


def not_free(slot: SlotLease, *, is_asleep: bool = False) -> OperationError:
    """The refusal of a GPU that was named, or on which a workload sleeps, which can be restored on no other.

    Args:
        slot: The slot of the GPU.
        is_asleep: Whether the GPU is for a workload that sleeps on it.
    """
    reason, what = errors_pb2.ERROR_REASON_NO_FREE_GPU, _state_name(slot.state)
    standing = slot.standing
    own: tuple[str, ...] = ()
    if slot.hold is not None:
        what += f" under hold {slot.hold.hold_id} until {slot.hold.expire_time:%H:%M:%S} UTC"
        own = ("name the hold", "wait")
    elif slot.lease is not None:
        what += f" for workload {slot.lease.workload_id}"
        own = ("suspend its holder",)
    elif slot.state == UNHEALTHY:
        reason, what = (
            errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
            f"excluded by its health ({standing.health_reason})",
        )
        own = ("mend it and reset its health",)
    elif slot.state == CORDONED and standing.cordon is not None:
        remedy = _remedy(("uncordon it",), is_asleep=is_asleep)
        return cordoned(slot.gpu_uuid, standing.cordon, {"gpu_uuid": slot.gpu_uuid}, remedy)
    elif slot.foreign:
        first = slot.foreign[0]
        reason = errors_pb2.ERROR_REASON_FOREIGN_PROCESS
        what = f"held by process {first.pid} of user {first.user or 'unknown'}"
        own = ("end that process", "adopt it")
    remedy = _remedy(own, is_asleep=is_asleep)
    return OperationError(reason, f"{slot.gpu_uuid} is {what}: {remedy}", {"gpu_uuid": slot.gpu_uuid})


def _remedy(own: tuple[str, ...], *, is_asleep: bool) -> str:
    elsewhere = "suspend the sleeping workload by cuda_suspend and restore it on another GPU"
    *ways, last = (*own, elsewhere) if is_asleep else ("choose another", *own)
    return f"{', '.join(ways)}, or {last}" if ways else last


def not_matching(gpu: PoolGpu, request: GpuRequest) -> OperationError:
    """The refusal of a named GPU that a request does not allow."""
    has, needs = f"is a {gpu.name or 'GPU without a name'}", f"a {request.name}"
    if request.name in ("", gpu.name):
        if request.gpu_uuids and gpu.uuid not in request.gpu_uuids:
            has, needs = "is none of the permitted GPUs", f"one of {', '.join(request.gpu_uuids)}"
        elif request.acceptable_units and gpu.units not in request.acceptable_units:
            accepted = " or ".join(map(str, sorted(request.acceptable_units)))
            has, needs = f"has {gpu.units} units", f"a GPU with {accepted} units"
        else:
            size = "memory of unknown size" if gpu.memory_bytes is None else size_text(gpu.memory_bytes)
            has, needs = f"has {size}", f"a GPU with {size_text(request.memory_bytes)} at least"
    return OperationError(
        errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU,
        f"{gpu.uuid} {has}, and the spec of the workload needs {needs}: choose another GPU",
        {"gpu_uuid": gpu.uuid},
    )


def wanted(request: GpuRequest) -> str:
    """The number of GPUs, as text."""
    units = f" with {request.units} units" if request.units else ""
    return f"{request.count} GPU{'' if request.count == 1 else 's'}{units}"


def _state_name(state: SlotState.ValueType) -> str:
    return lease_pb2.SlotState.Name(state).removeprefix("SLOT_STATE_").lower()
