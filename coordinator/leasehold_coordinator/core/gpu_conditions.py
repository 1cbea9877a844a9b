"""What keeps GPUs and workers out of service, and what has changed of it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from leasehold.v1 import event_pb2, gpu_pb2, lease_pb2
from leasehold.v1.event_pb2 import EventKind
from leasehold.v1.gpu_pb2 import GpuHealth
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease, SlotState

from leasehold_coordinator.core.gpu_texts import cordon_text, foreign_text

HEALTHY: Final = frozenset({gpu_pb2.GPU_HEALTH_UNSPECIFIED, gpu_pb2.GPU_HEALTH_OK})
WORKABLE: Final = HEALTHY | {gpu_pb2.GPU_HEALTH_THROTTLED}
"""With these a GPU takes work. Of one that only a newer worker knows, its slot's state tells."""


def state_without_lease(lease: GpuLease) -> SlotState.ValueType:
    """The state of a GPU that nobody leases, by what its entry says of it."""
    if lease.HasField("cordon"):
        return lease_pb2.SLOT_STATE_CORDONED
    if lease.health not in WORKABLE:
        return lease_pb2.SLOT_STATE_UNHEALTHY
    if lease.foreign_processes:
        return lease_pb2.SLOT_STATE_FOREIGN
    return lease_pb2.SLOT_STATE_FREE


def seen_state(lease: GpuLease) -> SlotState.ValueType:
    """The state of a GPU: as reported, but that one which is cordoned or unhealthy is never free."""
    if lease.state == lease_pb2.SLOT_STATE_FREE:
        state = state_without_lease(lease)
        if state != lease_pb2.SLOT_STATE_FOREIGN:  # the worker may be set to bear with them
            return state
    return lease.state


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is known against a worker and its GPUs.

    Attributes:
        cordon: Of the whole worker. None: there is none.
        gpus: The entries of its GPUs, by UUID.
    """

    cordon: Cordon | None = None
    gpus: dict[str, GpuLease] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConditionChange:
    """Something that has changed.

    Attributes:
        kind: What kind of event it is.
        message: It in words, beginning with what follows the GPU's or the worker's name.
        gpu: The entry of the GPU. None: it is about the worker.
    """

    kind: EventKind.ValueType
    message: str
    gpu: GpuLease | None = None


def against(conditions: Conditions) -> Conditions | None:
    """Copies of the entries with a condition, which :func:`changes` needs later. None: no entry has one."""
    gpus = {}
    for uuid, lease in conditions.gpus.items():
        if _has_condition(lease):
            gpus[uuid] = GpuLease()
            gpus[uuid].CopyFrom(lease)
    if conditions.cordon is None:
        return Conditions(None, gpus) if gpus else None
    cordon = Cordon()
    cordon.CopyFrom(conditions.cordon)
    return Conditions(cordon, gpus)


def changes(before: Conditions, after: Conditions) -> Iterator[ConditionChange]:
    """What has changed. A GPU that was not there before had nothing against it.

    Of one that is gone nothing is told.
    """
    if message := _cordon_change(before.cordon, after.cordon):
        yield ConditionChange(event_pb2.EVENT_KIND_CORDON, message)
    for uuid, now in after.gpus.items():
        if uuid not in before.gpus and not _has_condition(now):
            continue
        was = before.gpus.get(uuid, GpuLease())
        if message := _health_change(was, now):
            yield ConditionChange(event_pb2.EVENT_KIND_GPU_HEALTH, message, now)
        if message := _cordon_change(_cordon_of(was), _cordon_of(now)):
            yield ConditionChange(event_pb2.EVENT_KIND_CORDON, message, now)
        for message in _foreign_changes(was.foreign_processes, now.foreign_processes):
            yield ConditionChange(event_pb2.EVENT_KIND_GPU_FOREIGN, message, now)


def _has_condition(lease: GpuLease) -> bool:
    return lease.health not in HEALTHY or lease.HasField("cordon") or bool(lease.foreign_processes)


def _cordon_of(lease: GpuLease) -> Cordon | None:
    return lease.cordon if lease.HasField("cordon") else None


def _cordon_change(before: Cordon | None, after: Cordon | None) -> str:
    if after is None:
        return "is back in service" if before is not None else ""
    if before is not None and (before.reason, before.cordoned_by) == (after.reason, after.cordoned_by):
        return ""
    return f"is cordoned{cordon_text(after)}"


def _health_change(before: GpuLease, after: GpuLease) -> str:
    if before.health == after.health or {before.health, after.health} <= HEALTHY:
        return ""
    if after.health in HEALTHY:
        return "is OK again"
    return f"is {health_name(after.health)}{f': {after.health_reason}' if after.health_reason else ''}"


def _foreign_changes(before: Sequence[ForeignProcess], after: Sequence[ForeignProcess]) -> Iterator[str]:
    known, now = {process.pid for process in before}, {process.pid for process in after}
    if come := [process for process in after if process.pid not in known]:
        for workload_id, name in dict.fromkeys((each.workload_id, each.workload_name) for each in come):
            some = [process for process in come if process.workload_id == workload_id]
            whose = f"of workload {name}, which does not lease it: suspend and restore {name}"
            held_by = foreign_text(GpuLease(foreign_processes=some))
            yield f"is held by {held_by}, {whose if workload_id else 'which no workload has'}"
    if left := [process for process in before if process.pid not in now]:
        yield f"is no longer held by {foreign_text(GpuLease(foreign_processes=left))}"


def health_name(health: GpuHealth.ValueType) -> str:
    """The health as people read it; the number of one that only a newer worker knows."""
    value = GpuHealth.DESCRIPTOR.values_by_number.get(health)
    return value.name.removeprefix("GPU_HEALTH_") if value else f"of health {health}"
