"""Sets of workload states that decisions are made by. Pure."""

from typing import Final

from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState

ENDED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_EXITED,
        workload_pb2.WORKLOAD_STATE_FAILED,
        workload_pb2.WORKLOAD_STATE_RELEASED,
    }
)


def is_ended(state: WorkloadState.ValueType) -> bool:
    """Whether a workload in this state is over."""
    return state in ENDED


def state_name(state: WorkloadState.ValueType) -> str:
    """The state as people read it; the number of one that only a newer worker knows."""
    value = WorkloadState.DESCRIPTOR.values_by_number.get(state)
    return value.name.removeprefix("WORKLOAD_STATE_") if value else str(state)
