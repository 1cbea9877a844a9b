"""What an operation may say of each fault: the reasons, and the members it may give up. Pure.

Each row is what the driver's answer means to an operator by docs/driver.md, whatever the worker makes of it.
"""

from collections.abc import Iterable
from typing import Final

from leasehold.v1.errors_pb2 import ErrorReason

from .cases import QUERIES, CaseFault, Condition, Victim

WEDGING: Final = frozenset({1, 2, 304})
"""Answers of a restore after which no restore works. With GPU pairs, 1 and 304 can have other causes."""

Reasons = frozenset[ErrorReason.ValueType]


def _reasons(*names: str) -> Reasons:
    return frozenset(ErrorReason.Value(f"ERROR_REASON_{name}") for name in names)


ANSWERS: Final[dict[int, Reasons]] = {
    3: _reasons("NOT_A_CUDA_PROCESS"),
    304: _reasons("PERMISSION_OR_OS"),
    401: _reasons("WRONG_STATE"),
    801: _reasons("UNSUPPORTED_STATE"),
}
"""What the driver's answers mean, whatever was called. Others are errors of the driver."""

ANSWERS_OF_CALLS: Final[dict[tuple[str, int], Reasons]] = {
    ("lock", 600): _reasons("LOCK_TIMEOUT"),
    ("checkpoint", 2): _reasons("INSUFFICIENT_HOST_MEMORY"),
    ("restore", 1): _reasons("INCOMPATIBLE_GPU", "MEMBER_WEDGED"),
    ("restore", 2): _reasons("MEMBER_WEDGED"),
    ("restore", 304): _reasons("PERMISSION_OR_OS", "MEMBER_WEDGED"),
    # A process without CUDA is none of the members, which NVML may contradict.
    ("get_restore_thread_id", 1): _reasons("NOT_A_CUDA_PROCESS", "MEMBERS_CHANGED"),
    ("get_restore_thread_id", 3): _reasons("NOT_A_CUDA_PROCESS", "MEMBERS_CHANGED"),
}

DRIVER: Final = _reasons("DRIVER_ERROR")
LIES: Final = _reasons("DRIVER_ERROR", "WRONG_STATE", "MEMORY_NOT_FREED", "REMAP_NOT_APPLIED")
"""For calls that say what is not so. A lie about the state may make another call impossible."""

DEATHS: Final = _reasons("TARGET_CRASHED", "NOT_A_CUDA_PROCESS", "MEMBERS_CHANGED")
"""For members that die. Those that died before they were counted are missed in one way or another."""

CONDITIONS: Final[dict[Condition, Reasons]] = {
    Condition.BUSY: _reasons("LOCK_TIMEOUT"),
    Condition.MPS: _reasons("UNSUPPORTED_STATE"),
    Condition.MULTICAST: _reasons("DRIVER_TIMEOUT"),
    Condition.PARTIAL_PASSTHROUGH: _reasons("UNSUPPORTED_STATE"),
    Condition.PROFILER: _reasons("UNSUPPORTED_STATE"),
    # A restore with pairs can't tell, and the one without pairs does.
    Condition.IPC_IMPORTER: _reasons("INCOMPATIBLE_GPU", "MEMBER_WEDGED"),
    Condition.FULL: _reasons("INSUFFICIENT_DEVICE_MEMORY"),
    Condition.LOST: _reasons("DRIVER_ERROR", "GPU_UNHEALTHY"),
    Condition.ECC: _reasons("GPU_UNHEALTHY"),
    Condition.MIG: _reasons("UNSUPPORTED_STATE", "GPU_UNHEALTHY"),
    # Without the sizes the worker may refuse, or find out too late that memory is lacking.
    Condition.HIDDEN_MEMORY: _reasons("INSUFFICIENT_DEVICE_MEMORY"),
}

CONDITIONS_IN_CALLS: Final[dict[Condition, Reasons]] = {
    Condition.FULL: _reasons("MEMBER_WEDGED", "INSUFFICIENT_DEVICE_MEMORY"),
    # The driver says "out of memory" of a checkpoint on a GPU with MIG (NVIDIA/cuda-checkpoint issue 42).
    Condition.MIG: _reasons("INSUFFICIENT_HOST_MEMORY"),
}


def reasons_of(fault: CaseFault) -> Reasons:
    """The reasons that an operation may give for having failed by a fault."""
    if fault.condition is not None:
        begun_before = CONDITIONS[fault.condition]
        return CONDITIONS_IN_CALLS.get(fault.condition, begun_before) if fault.call else begun_before
    if fault.is_deadly:
        return DEATHS
    if fault.error:
        answer = ANSWERS_OF_CALLS.get((fault.call, fault.error)) or ANSWERS.get(fault.error, DRIVER)
        # Once a call has been made, a state that can't be read is told as that.
        return answer | DRIVER if fault.call == "get_state" else answer
    if fault.hang:
        return _reasons("DRIVER_TIMEOUT") | (DRIVER if fault.call == "get_state" else frozenset())
    if fault.victim is Victim.HELPER:
        return DRIVER
    if fault.skip or fault.state is not None or fault.keep_memory or fault.ignore_gpu_pairs:
        return LIES
    return frozenset()


def may_be_unknown(fault: CaseFault) -> bool:
    """Whether a member that the fault was for may be called UNKNOWN: the driver does not say where it is."""
    return fault.call in QUERIES or fault.hang


def may_be_wedged(fault: CaseFault) -> bool:
    """Whether a member that the fault was for may be called WEDGED, as no restore works any more."""
    if fault.condition is Condition.IPC_IMPORTER:
        return True
    return fault.call == "restore" and (fault.error in WEDGING or fault.condition is Condition.FULL)


def reasons_of_all(faults: Iterable[CaseFault]) -> Reasons:
    """The reasons that an operation may give for having failed by any of the faults."""
    return frozenset[ErrorReason.ValueType]().union(*map(reasons_of, faults))
