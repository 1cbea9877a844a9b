"""Sets of workload states. Pure."""

from typing import Final

from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
SLEEPING: Final = workload_pb2.WORKLOAD_STATE_SLEEPING
WEDGED: Final = workload_pb2.WORKLOAD_STATE_WEDGED
UNKNOWN: Final = workload_pb2.WORKLOAD_STATE_UNKNOWN
FAILED: Final = workload_pb2.WORKLOAD_STATE_FAILED
STOPPED: Final = workload_pb2.WORKLOAD_STATE_STOPPED

ENDED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_EXITED,
        FAILED,
        workload_pb2.WORKLOAD_STATE_RELEASED,
    }
)

PARKED: Final = frozenset(
    {
        SLEEPING,
        workload_pb2.WORKLOAD_STATE_SUSPENDED,
        workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
        STOPPED,
    }
)
"""States of suspended workloads: no lease, and a restore is possible."""

PARKABLE: Final = PARKED | {RUNNING}
"""A suspend with a stronger process strategy may follow a suspend. The worker compares the strategies."""

WAKEABLE: Final = PARKED | {UNKNOWN}
"""In UNKNOWN, the worker examines each process again, and restores those that the driver can restore."""

STOPPABLE: Final = PARKED | {RUNNING, WEDGED, UNKNOWN}


def is_ended(state: WorkloadState.ValueType) -> bool:
    """Whether a workload in this state has ended."""
    return state in ENDED


def state_name(state: WorkloadState.ValueType) -> str:
    """The state in words. A state of a newer worker is shown as a number."""
    value = WorkloadState.DESCRIPTOR.values_by_number.get(state)
    return value.name.removeprefix("WORKLOAD_STATE_") if value else str(state)
