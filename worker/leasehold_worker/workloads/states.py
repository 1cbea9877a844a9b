"""The states of a workload, and the sets of them that the worker uses."""

from collections.abc import Mapping
from typing import Final

from leasehold.v1 import eviction_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import ProcessStrategy
from leasehold.v1.workload_pb2 import WorkloadState

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
SLEEPING: Final = workload_pb2.WORKLOAD_STATE_SLEEPING
SUSPENDED: Final = workload_pb2.WORKLOAD_STATE_SUSPENDED
CHECKPOINTED: Final = workload_pb2.WORKLOAD_STATE_CHECKPOINTED
STOPPED: Final = workload_pb2.WORKLOAD_STATE_STOPPED
WEDGED: Final = workload_pb2.WORKLOAD_STATE_WEDGED
UNKNOWN: Final = workload_pb2.WORKLOAD_STATE_UNKNOWN
EXITED: Final = workload_pb2.WORKLOAD_STATE_EXITED
FAILED: Final = workload_pb2.WORKLOAD_STATE_FAILED
RELEASED: Final = workload_pb2.WORKLOAD_STATE_RELEASED

SUSPENDING: Final = workload_pb2.WORKLOAD_STATE_SUSPENDING
RESTORING: Final = workload_pb2.WORKLOAD_STATE_RESTORING
REMAPPING: Final = workload_pb2.WORKLOAD_STATE_REMAPPING

ENDED: Final = frozenset({EXITED, FAILED, RELEASED})

AWAY: Final = frozenset({CHECKPOINTED, STOPPED})
"""Suspended without processes."""

PARKED: Final = frozenset({SLEEPING, SUSPENDED, *AWAY})

IN_OPERATION: Final = frozenset({SUSPENDING, RESTORING, REMAPPING})

PARKED_BY: Final[Mapping[WorkloadState.ValueType, ProcessStrategy.ValueType]] = {
    SLEEPING: eviction_pb2.PROCESS_STRATEGY_KEEP_RUNNING,
    SUSPENDED: eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
    CHECKPOINTED: eviction_pb2.PROCESS_STRATEGY_CHECKPOINT,
    STOPPED: eviction_pb2.PROCESS_STRATEGY_STOP,
}
"""The process strategy that leads to a suspended state."""
