"""Conditions that keep GPUs and workers out of service, and changes of conditions. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from leasehold.v1 import event_pb2, gpu_pb2, lease_pb2
from leasehold.v1.event_pb2 import EventKind
from leasehold.v1.gpu_pb2 import GpuHealth
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease, SlotState

from leasehold_coordinator.core.field_rules import TEXT_LIMIT
from leasehold_coordinator.core.gpu_texts import cordon_text, foreign_text

HEALTHY: Final = frozenset({gpu_pb2.GPU_HEALTH_UNSPECIFIED, gpu_pb2.GPU_HEALTH_OK})
WORKABLE: Final = HEALTHY | {gpu_pb2.GPU_HEALTH_THROTTLED}
"""Health values with which a GPU takes work. An unknown value of a newer worker counts as unhealthy."""


def state_without_lease(lease: GpuLease) -> SlotState.ValueType:
    """The state that a GPU has without its lease, by the conditions in its entry."""
    if lease.HasField("cordon"):
        return lease_pb2.SLOT_STATE_CORDONED
    if lease.health not in WORKABLE:
        return lease_pb2.SLOT_STATE_UNHEALTHY
    if lease.foreign_processes:
        return lease_pb2.SLOT_STATE_FOREIGN
    return lease_pb2.SLOT_STATE_FREE


def seen_state(lease: GpuLease) -> SlotState.ValueType:
    """The state of a GPU as reported, except that a cordoned or unhealthy GPU is never free."""
    if lease.state == lease_pb2.SLOT_STATE_FREE:
        state = state_without_lease(lease)
        if state != lease_pb2.SLOT_STATE_FOREIGN:  # the worker may be set to tolerate foreign processes
            return state
    return lease.state


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a worker and its GPUs.

    Attributes:
        cordon: The cordon of the whole worker. None: not cordoned.
        gpus: The lease entries of its GPUs, by UUID.
    """

    cordon: Cordon | None = None
    gpus: dict[str, GpuLease] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConditionChange:
    """A change of a condition, which becomes an event.

    Attributes:
        kind: The kind of the event.
        message: The change in words. The caller puts the name of the GPU or the worker in front.
        gpu: The lease entry of the GPU. None: the change is about the worker.
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
    """The changes between two reports.

    A GPU that ``before`` lacks counts as one without conditions. A GPU that ``after`` lacks is ignored.
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
    reason = after.health_reason[:TEXT_LIMIT]
    return f"is {health_name(after.health)}{f': {reason}' if reason else ''}"


def _foreign_changes(before: Sequence[ForeignProcess], after: Sequence[ForeignProcess]) -> Iterator[str]:
    known, now = {process.pid for process in before}, {process.pid for process in after}
    if come := [process for process in after if process.pid not in known]:
        by_workload: dict[str, list[ForeignProcess]] = {}
        for process in come:
            by_workload.setdefault(process.workload_id, []).append(process)
        for workload_id, some in by_workload.items():
            name = some[0].workload_name[:TEXT_LIMIT]
            whose = f"of workload {name}, which does not lease it: suspend and restore {name}"
            held_by = foreign_text(GpuLease(foreign_processes=some))
            yield f"is held by {held_by}, {whose if workload_id else 'which belongs to no workload'}"
    if left := [process for process in before if process.pid not in now]:
        yield f"is no longer held by {foreign_text(GpuLease(foreign_processes=left))}"


def health_name(health: GpuHealth.ValueType) -> str:
    """The health in words. A value of a newer worker is shown as a number."""
    value = GpuHealth.DESCRIPTOR.values_by_number.get(health)
    return value.name.removeprefix("GPU_HEALTH_") if value else f"of health {health}"
