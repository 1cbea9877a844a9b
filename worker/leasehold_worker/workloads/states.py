"""The states of a workload, and the sets of them that matter."""

from typing import Final

from leasehold.v1 import workload_pb2

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING

SUSPENDED: Final = workload_pb2.WORKLOAD_STATE_SUSPENDED

EXITED: Final = workload_pb2.WORKLOAD_STATE_EXITED

FAILED: Final = workload_pb2.WORKLOAD_STATE_FAILED

WEDGED: Final = workload_pb2.WORKLOAD_STATE_WEDGED

UNKNOWN: Final = workload_pb2.WORKLOAD_STATE_UNKNOWN

SLEEPING: Final = workload_pb2.WORKLOAD_STATE_SLEEPING

CHECKPOINTED: Final = workload_pb2.WORKLOAD_STATE_CHECKPOINTED

STOPPED: Final = workload_pb2.WORKLOAD_STATE_STOPPED

RELEASED: Final = workload_pb2.WORKLOAD_STATE_RELEASED

ENDED: Final = frozenset({EXITED, FAILED, RELEASED})

AWAY: Final = frozenset({CHECKPOINTED, STOPPED})
"""Parked without processes."""

PARKED: Final = frozenset({SLEEPING, SUSPENDED, *AWAY})

IN_OPERATION: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_SUSPENDING,
        workload_pb2.WORKLOAD_STATE_RESTORING,
        workload_pb2.WORKLOAD_STATE_REMAPPING,
    }
)
