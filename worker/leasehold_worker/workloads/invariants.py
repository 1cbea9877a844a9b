"""Invariants of workloads and holds between two operations, for models, fault grids and chaos."""

from collections.abc import Iterator

from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.workloads.states import (
    AWAY,
    CHECKPOINTED,
    ENDED,
    IN_OPERATION,
    LOST,
    PARKED,
    PARKED_BY,
    RUNNING,
    state_text,
)
from leasehold_worker.workloads.workload import Workload


def violations(workload: Workload) -> Iterator[str]:
    """The violations of a workload without a running operation. Nothing: the workload is valid."""
    name, state = workload.name, workload.state
    if state in IN_OPERATION:
        yield f"{name} is in the middle of an operation"
        return
    if (state in PARKED) != (workload.parked is not None) and state not in LOST:
        found = "has no" if state in PARKED else "has a"
        yield f"{name} is {state_text(state)}, and {found} record of its suspend"
    if state in PARKED and workload.lease is not None:
        yield f"{name} is suspended and holds {workload.lease.gpu_uuids}"
    if workload.parked is not None and state in PARKED:
        strategy = workload.parked.policy.process_strategy
        if strategy != PARKED_BY[state]:
            yield f"{name} is {state_text(state)}, and was suspended by strategy {strategy}"
        if state == CHECKPOINTED and not workload.parked.checkpoint_id:
            yield f"{name} is on disk, and no checkpoint is named"
    if (state in AWAY) != workload.absent and state not in ENDED:
        found = "gone" if workload.absent else "there"
        yield f"{name} is {state_text(state)}, and its processes are recorded as {found}"
    if state in LOST and workload.error is None:
        yield f"{name} is unknown or wedged, without an error"
    if state == RUNNING and workload.home:
        yield f"{name} is RUNNING, but the GPUs of a later restore are recorded: {workload.home}"
    if state in ENDED:
        if workload.lease is not None or workload.host is not None or workload.members:
            yield f"{name} has ended, and still holds something"
        if not workload.ended.is_set():
            yield f"{name} has ended, and its waiters are not notified"


def hold_violations(pool: GpuPool) -> Iterator[str]:
    """The violations of a pool's holds without a running operation. Nothing: they are valid."""
    held: dict[str, set[str]] = {}
    for slot in pool.slots.snapshot().slots:
        if slot.hold is None:
            if slot.lease is not None and not slot.lease.workload_id:
                yield f"{slot.gpu_uuid} is leased to no workload, and under no hold"
            continue
        held.setdefault(slot.hold.hold_id, set()).add(slot.gpu_uuid)
        if slot.hold.hold_id not in pool.holds:
            yield f"{slot.gpu_uuid} is under hold {slot.hold.hold_id}, which has ended"
        if slot.lease is None or slot.lease.workload_id or not slot.reserved:
            yield f"{slot.gpu_uuid} is under hold {slot.hold.hold_id}, and not reserved for it alone"
    for hold in pool.holds:
        if pool.holds.taker_of(hold.hold_id) is not None:
            yield f"hold {hold.hold_id} is being taken"
        if not held.get(hold.hold_id, set()) <= set(hold.gpu_uuids) or hold.hold_id not in held:
            yield f"hold {hold.hold_id} names {hold.gpu_uuids}, and has {held.get(hold.hold_id)}"
