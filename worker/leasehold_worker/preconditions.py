"""What must hold before an operation begins. Every check refuses with its reason, and changes nothing."""

from collections.abc import Iterable, Sequence
from typing import Final

from leasehold.v1 import errors_pb2, gpu_pb2, workload_pb2
from leasehold.v1.workload_pb2 import MemberState, WorkloadState

from leasehold_worker.checkpoint import group
from leasehold_worker.checkpoint.driver import Driver
from leasehold_worker.checkpoint.gpu_pairs import GpuPair, normalize_uuid
from leasehold_worker.checkpoint.group import Member
from leasehold_worker.errors import OperationError
from leasehold_worker.processes import ProcessIdentity, memory_bytes, why_blocked
from leasehold_worker.workloads import ENDED, Workload

SUSPEND_CUDA_VERSION: Final = 12080
"""The driver API for checkpoints came with CUDA 12.8 (driver 570)."""

REMAP_CUDA_VERSION: Final = 13000
"""GPU pairs came with CUDA 13.0 (driver 580)."""


def invalid(field_name: str, message: str) -> OperationError:
    """A field of a request breaks its rule."""
    return OperationError(errors_pb2.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field_name})


def require_state(workload: Workload, state: WorkloadState.ValueType, verb: str) -> None:
    """Refuses a workload in another state with WRONG_STATE; ``verb`` is what can't be done then."""
    if workload.state != state:
        actual = WorkloadState.Name(workload.state).removeprefix("WORKLOAD_STATE_")
        wanted = WorkloadState.Name(state).removeprefix("WORKLOAD_STATE_")
        raise OperationError(
            errors_pb2.ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is {actual}: only one that is {wanted} can be {verb}",
            {"observed_state": actual},
        )


def require_alive(workload: Workload) -> None:
    """Refuses to lease GPUs to a workload that ended during the operation, with TARGET_CRASHED."""
    if workload.state in ENDED:
        raise OperationError(
            errors_pb2.ERROR_REASON_TARGET_CRASHED, f"workload {workload.name} ended during the operation"
        )


def why_unsupported(driver: Driver, cuda_version: int) -> str | None:
    """Why the driver can't do what came with a CUDA version, with the remedy. None: it can."""
    if driver.unavailable_reason is not None:
        return f"there is no usable CUDA driver ({driver.unavailable_reason}): install one"
    if (driver.cuda_version or 0) < cuda_version:
        supported, needed = _version_text(driver.cuda_version), _version_text(cuda_version)
        return f"the driver supports CUDA {supported}, and {needed} is needed: update the driver"
    return None


def require_driver(driver: Driver, cuda_version: int) -> None:
    """Refuses with UNSUPPORTED_DRIVER what the driver is too old for."""
    reason = why_unsupported(driver, cuda_version)
    if reason is not None:
        raise OperationError(errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER, reason)


def require_runnable(workload: Workload, processes: Iterable[ProcessIdentity]) -> None:
    """Refuses with TARGET_NOT_RUNNABLE processes on which driver calls would block for ever."""
    for identity in processes:
        if reason := why_blocked(identity):
            raise OperationError(
                errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
                f"process {identity.pid} of workload {workload.name} is {reason}: let it run first",
                {"pid": str(identity.pid)},
            )


def require_members(workload: Workload, members: Sequence[Member]) -> None:
    """Refuses a workload without CUDA processes, or with one that is not RUNNING."""
    if not members:
        raise OperationError(
            errors_pb2.ERROR_REASON_NOT_A_CUDA_PROCESS,
            f"no process of workload {workload.name} uses CUDA: wait until it does, or stop it",
        )
    for member in members:
        if member.state != group.RUNNING:
            state = MemberState.Name(member.state).removeprefix("MEMBER_STATE_")
            raise OperationError(
                errors_pb2.ERROR_REASON_WRONG_STATE,
                f"process {member.identity.pid} is {state}, not RUNNING: somebody else suspends it",
                {"pid": str(member.identity.pid), "observed_state": state},
            )


def require_host_memory(needed_bytes: int) -> None:
    """Refuses what host memory can't hold: the driver's copy would have the process killed."""
    available = memory_bytes("MemAvailable")
    if available is not None and needed_bytes > available:
        raise OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
            f"{needed_bytes} bytes of device memory don't fit into the {available} bytes of host memory that "
            "are available: free host memory, or have the program drop device memory first",
        )


def require_known_features(spec: workload_pb2.WorkloadSpec) -> None:
    """Refuses with UNSUPPORTED_CAPABILITY what a spec may say and this worker does not do yet."""
    unknown = [
        name for name in ("cpu_millicores", "memory_bytes", "disk_bytes") if spec.resources.HasField(name)
    ]
    if spec.hooks:
        unknown.append("hooks")
    if spec.HasField("eviction") and not is_plain_suspend(spec.eviction):
        unknown.append("eviction")
    if unknown:
        raise OperationError(
            errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
            f"this version does not honour {', '.join(unknown)}: leave it out",
            {"field": unknown[0]},
        )


def is_plain_suspend(policy: workload_pb2.EvictionPolicy) -> bool:
    """Whether a policy is to retain the weights and suspend by CUDA, the one that is built."""
    return policy.weight_strategy in (
        workload_pb2.WEIGHT_STRATEGY_UNSPECIFIED,
        workload_pb2.WEIGHT_STRATEGY_RETAIN,
    ) and policy.process_strategy in (
        workload_pb2.PROCESS_STRATEGY_UNSPECIFIED,
        workload_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
    )


def parse_pairs(pairs: Iterable[gpu_pb2.GpuPair], held: Sequence[str]) -> tuple[GpuPair, ...]:
    """The pairs with their UUIDs in NVML's form.

    Raises:
        OperationError: INVALID_ARGUMENT, one is malformed or its source is not a GPU that is held.
    """
    parsed = tuple(GpuPair(normalize_uuid(pair.old_uuid), normalize_uuid(pair.new_uuid)) for pair in pairs)
    for pair in parsed:
        if pair.old_uuid not in held:
            raise invalid(
                "pairs",
                f"the workload does not hold {pair.old_uuid}: it holds {', '.join(held) or 'no GPU'}",
            )
    return parsed


def _version_text(cuda_version: int | None) -> str:
    return "nothing" if cuda_version is None else f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"
