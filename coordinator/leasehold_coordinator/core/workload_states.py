"""Sets of workload states that decisions are made by. Pure."""

from typing import Final

from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
SLEEPING: Final = workload_pb2.WORKLOAD_STATE_SLEEPING
WEDGED: Final = workload_pb2.WORKLOAD_STATE_WEDGED
UNKNOWN: Final = workload_pb2.WORKLOAD_STATE_UNKNOWN

ENDED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_EXITED,
        workload_pb2.WORKLOAD_STATE_FAILED,
        workload_pb2.WORKLOAD_STATE_RELEASED,
    }
)

PARKED: Final = frozenset(
    {
        SLEEPING,
        workload_pb2.WORKLOAD_STATE_SUSPENDED,
        workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
        workload_pb2.WORKLOAD_STATE_STOPPED,
    }
)
"""It holds no lease, and waits to be woken: by the process strategies in the order of their strength."""

PARKABLE: Final = PARKED | {RUNNING}
"""One that is parked may be parked by a stronger process strategy: its worker knows which it was."""

WAKEABLE: Final = PARKED | {UNKNOWN}
"""UNKNOWN: the worker looks at each process afresh, and brings back those that the driver lets it."""

STOPPABLE: Final = PARKED | {RUNNING, WEDGED, UNKNOWN}


def is_ended(state: WorkloadState.ValueType) -> bool:
    """Whether a workload in this state is over."""
    return state in ENDED


def state_name(state: WorkloadState.ValueType) -> str:
    """The state as people read it; the number of one that only a newer worker knows."""
    value = WorkloadState.DESCRIPTOR.values_by_number.get(state)
    return value.name.removeprefix("WORKLOAD_STATE_") if value else str(state)
