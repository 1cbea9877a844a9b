"""The states of a workload, the sets of them that the worker uses, and the table of their transitions.

An operation takes a workload from a state of rest through a state of the operation to a state of rest. At
any time the driver can show another state than the recorded one, since other programs can also suspend and
restore a process. Only an operation ends the processes of a workload that continues without them, or starts
them again.
"""

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
STOPPING: Final = workload_pb2.WORKLOAD_STATE_STOPPING

ENDED: Final = frozenset({EXITED, FAILED, RELEASED})

AWAY: Final = frozenset({CHECKPOINTED, STOPPED})
"""Suspended without processes."""

PARKED: Final = frozenset({SLEEPING, SUSPENDED, *AWAY})

LOST: Final = frozenset({WEDGED, UNKNOWN})
"""The members can't be restored, or are in different states."""

IN_OPERATION: Final = frozenset({SUSPENDING, RESTORING, REMAPPING})

PARKED_BY: Final[Mapping[WorkloadState.ValueType, ProcessStrategy.ValueType]] = {
    SLEEPING: eviction_pb2.PROCESS_STRATEGY_KEEP_RUNNING,
    SUSPENDED: eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
    CHECKPOINTED: eviction_pb2.PROCESS_STRATEGY_CHECKPOINT,
    STOPPED: eviction_pb2.PROCESS_STRATEGY_STOP,
}
"""The process strategy that leads to a suspended state."""

_SHOWN: Final = frozenset({RUNNING, SLEEPING, SUSPENDED, *LOST})
"""States of workloads with processes, which the driver can show at any time."""

_AT_ANY_TIME: Final = frozenset({STOPPING, UNKNOWN, *ENDED})

TRANSITIONS: Final[Mapping[WorkloadState.ValueType, frozenset[WorkloadState.ValueType]]] = {
    before: frozenset(after) | _AT_ANY_TIME
    for before, after in (
        (RUNNING, _SHOWN | IN_OPERATION),
        (SLEEPING, _SHOWN | {SUSPENDING, RESTORING}),
        # After a failed restore from an image, the restored processes are ended: CHECKPOINTED again.
        (SUSPENDED, _SHOWN | {SUSPENDING, RESTORING, CHECKPOINTED}),
        (WEDGED, _SHOWN | {CHECKPOINTED}),
        (UNKNOWN, _SHOWN | IN_OPERATION | {CHECKPOINTED}),
        (CHECKPOINTED, {SUSPENDING, RESTORING}),
        (STOPPED, {SUSPENDING, RESTORING}),
        (SUSPENDING, _SHOWN | AWAY),
        (RESTORING, _SHOWN | AWAY | {REMAPPING}),
        (REMAPPING, _SHOWN | {RESTORING}),
        (STOPPING, _SHOWN),
    )
}
"""The states that may follow a state. An ended workload stays ended."""


def state_text(state: WorkloadState.ValueType) -> str:
    """The name of a state in messages."""
    return WorkloadState.Name(state).removeprefix("WORKLOAD_STATE_")


def check_transition(before: WorkloadState.ValueType, after: WorkloadState.ValueType) -> None:
    """Refuses a transition that is not in the table. A state may be reported again.

    Raises:
        ValueError: A defect of the worker.
    """
    if after != before and after not in TRANSITIONS.get(before, ()):
        raise ValueError(f"no transition from {state_text(before)} to {state_text(after)} in the table")
