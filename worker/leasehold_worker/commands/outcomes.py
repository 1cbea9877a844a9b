"""The end of a command: succeeded, refused, failed, cancelled or expired."""

from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import CommandState

from leasehold_worker.commands.progress import Progress
from leasehold_worker.commands.states import (
    CANCELLED,
    EXPIRED,
    FAILED,
    REJECTED,
    SUCCEEDED,
)
from leasehold_worker.errors import OperationError

REASONS_OF_REFUSAL: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
        errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
        errors_pb2.ERROR_REASON_UNKNOWN_GPU,
        errors_pb2.ERROR_REASON_WRONG_STATE,
        errors_pb2.ERROR_REASON_NO_FREE_GPU,
        errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU,
        errors_pb2.ERROR_REASON_DUPLICATE_GPU,
        errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY,
        errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
        errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER,
        errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
        errors_pb2.ERROR_REASON_NOT_A_CUDA_PROCESS,
        errors_pb2.ERROR_REASON_NOT_READY,
        errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
        errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
        errors_pb2.ERROR_REASON_DEVICE_NODE_MISSING,
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
        errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
        errors_pb2.ERROR_REASON_CORDONED,
        errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
        errors_pb2.ERROR_REASON_FOREIGN_PROCESS,
        errors_pb2.ERROR_REASON_ALREADY_REGISTERED,
        errors_pb2.ERROR_REASON_UNKNOWN_PROCESS,
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        errors_pb2.ERROR_REASON_NOTHING_FREED,
        errors_pb2.ERROR_REASON_STATE_WOULD_BE_LOST,
        errors_pb2.ERROR_REASON_KERNEL_NOT_READY,
        errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT,
        errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
        errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
        errors_pb2.ERROR_REASON_UNKNOWN_HOLD,
        errors_pb2.ERROR_REASON_WORKLOAD_BUSY,
        errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE,
        errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
        # The preflight asks the driver and NVML where the members are.
        errors_pb2.ERROR_REASON_MEMBERS_CHANGED,
        errors_pb2.ERROR_REASON_DRIVER_TIMEOUT,
        errors_pb2.ERROR_REASON_DRIVER_ERROR,
    }
)
"""Reasons that mean REJECTED as long as no driver call has changed a process: nothing was begun."""

BEGUN: Final = frozenset(
    {"preempt", "make_room", "hooks", "save", "image", "resume", "start", "load", "terminate", "kill"}
)
"""Phases that change a workload without the driver, or another workload."""


def outcome_of(error: OperationError | None, progress: Progress) -> CommandState.ValueType:
    """The last state of a command that ended with this error, or without one."""
    if error is None:
        return SUCCEEDED
    if error.reason == errors_pb2.ERROR_REASON_CANCELLED:
        return CANCELLED
    if _has_called(progress):
        return FAILED
    if error.reason == errors_pb2.ERROR_REASON_EXPIRED:
        return EXPIRED
    return REJECTED if error.reason in REASONS_OF_REFUSAL else FAILED


def _has_called(progress: Progress) -> bool:
    called = any(outcome.phases for _, outcome in progress.outcomes)
    return called or any(phase.name in BEGUN for phase in progress.phases)
