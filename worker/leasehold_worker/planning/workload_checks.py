"""Conditions of workloads before an operation. Every check refuses with its reason, and changes nothing."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import trio
from leasehold.v1 import errors_pb2, gpu_pb2, operation_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    FAILED,
    LOCKED,
    RUNNING,
    Member,
    state_name,
)
from leasehold_worker.driver.process import DEFAULT_LOCK_TIMEOUT_S
from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.gpus.inventory import GpuUsage
from leasehold_worker.gpus.uuids import normalize_uuid
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.processes import ProcessIdentity, has_variable, is_alive
from leasehold_worker.timestamps import seconds
from leasehold_worker.workloads.eviction import forced_command
from leasehold_worker.workloads.states import (
    ENDED,
    PARKED,
    STOPPED,
    WEDGED,
    state_text,
)
from leasehold_worker.workloads.states import RUNNING as WORKLOAD_RUNNING
from leasehold_worker.workloads.states import UNKNOWN as WORKLOAD_UNKNOWN
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

JOB_FILE_VARIABLE: Final = "CUDA_CHECKPOINT_JOB_FILE"

_REMEDIES: Final = {
    WORKLOAD_RUNNING: "suspend it first",
    **dict.fromkeys(PARKED, "restore it first"),
    WORKLOAD_UNKNOWN: "restore it first, without naming GPUs",
    WEDGED: "stop it, nothing else helps",
    **dict.fromkeys(ENDED, "run it again"),
}
"""The ways out of the states in which an operation can't begin."""


def require_state(workload: Workload, states: Collection[WorkloadState.ValueType], verb: str) -> None:
    """Refuses a workload in other states with WRONG_STATE; ``verb`` names the refused operation."""
    if workload.state not in states:
        wanted = " or ".join(state_text(state) for state in sorted(states))
        raise OperationError(
            errors_pb2.ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is {state_text(workload.state)}, and must be {wanted} to be "
            f"{verb}: {_REMEDIES.get(workload.state, 'wait until its command has ended')}",
            {"observed_state": state_text(workload.state)},
        )


def require_stopped(workload: Workload) -> None:
    """Refuses with WRONG_STATE a checkpoint that is named for a workload that is not STOPPED."""
    if workload.state != STOPPED:
        raise OperationError(
            errors_pb2.ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is {state_text(workload.state)}, and only a STOPPED workload "
            "starts from a checkpoint that is named: leave out the checkpoint",
            {"observed_state": state_text(workload.state), "field": "checkpoint_id"},
        )


def require_alive(workload: Workload) -> None:
    """Refuses with TARGET_CRASHED to lease GPUs to a workload that ended during the operation."""
    # The exit monitor notices the end of the first process a little later.
    if workload.state in ENDED or not is_alive(workload.root):
        raise OperationError(
            errors_pb2.ERROR_REASON_TARGET_CRASHED,
            f"workload {workload.name} ended during the operation: look at its output",
        )


def require_members(workload: Workload, members: Sequence[Member], *, listed: bool = False) -> None:
    """Refuses a workload without CUDA processes, or with one that is not RUNNING.

    Args:
        workload: The workload.
        members: Its CUDA processes according to the driver.
        listed: NVML lists a process of the workload. So it uses CUDA even if the driver reports otherwise.
    """
    if not members:
        if workload.awaits_readiness and not listed:
            raise _not_ready(workload, "no process of it uses CUDA yet", "stop it")
        raise OperationError(
            errors_pb2.ERROR_REASON_NOT_A_CUDA_PROCESS,
            f"no process of workload {workload.name} uses CUDA: wait until it does, or stop it",
        )
    for member in members:
        if member.state != RUNNING:
            state = state_name(member.state)
            remedy = "stop the workload if it stays so"
            if member.state in (LOCKED, CHECKPOINTED):
                remedy = (
                    "another program suspended it: resume it with that program, or restart the worker and "
                    "restore the workload"
                )
            if member.state == FAILED:
                remedy = "stop the workload: the process is permanently FAILED"
            raise OperationError(
                errors_pb2.ERROR_REASON_WRONG_STATE,
                f"process {member.identity.pid} is {state}, and must be RUNNING to be suspended: {remedy}",
                {"pid": str(member.identity.pid), "observed_state": state},
            )


def require_ready(workload: Workload, asked: EvictionPolicy | None = None) -> None:
    """Refuses a running workload whose readiness probes have not succeeded, with NOT_READY.

    Args:
        workload: The workload.
        asked: The policy that the request names for a suspend. None: it names none.
    """
    if workload.awaits_readiness and workload.has_probe:
        why = workload.unready or "its readiness probe has not answered yet"
        raise _not_ready(workload, why, f"use `{forced_command(workload.name, asked)}`")


def _not_ready(workload: Workload, why: str, other: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_NOT_READY,
        f"workload {workload.name} is not ready ({why}): try again once `leasehold wait {workload.name}` has "
        f"returned, or {other}",
        {"workload_id": workload.workload_id},
    )


def require_all(
    processes: Iterable[ProcessIdentity], members: Iterable[Member], usage: Mapping[str, GpuUsage]
) -> None:
    """Refuses with MEMBERS_CHANGED a process that NVML lists on a GPU and that is not among the members."""
    known = {member.identity.pid for member in members}
    listed = {pid for gpu in usage.values() for pid in gpu.processes}
    for identity in processes:
        if identity.pid in listed - known:
            raise OperationError(
                errors_pb2.ERROR_REASON_MEMBERS_CHANGED,
                f"NVML lists process {identity.pid} on a GPU, but the driver reports that it "
                "does not use CUDA, as while it starts or ends: try again",
                {"pid": str(identity.pid)},
            )


async def is_sequential(spec: workload_pb2.WorkloadSpec, members: Sequence[Member]) -> bool:
    """Whether the members of a workload are called one after the other.

    A job that shares memory by CUDA IPC needs that, and its launcher leaves a mark in the environment of its
    members (NVIDIA/cuda-checkpoint issues 43 and 56). The spec has precedence. An environment that can't be
    read counts as one without the mark.
    """
    if not members or spec.member_order != workload_pb2.MEMBER_ORDER_UNSPECIFIED:
        await trio.lowlevel.checkpoint()
        return spec.member_order == workload_pb2.MEMBER_ORDER_SEQUENTIAL
    try:
        return await read_process(members[0].identity.pid, partial(_is_job, members))
    except OperationError as error:
        logger.warning("%s", error.message)
        return False


def _is_job(members: Iterable[Member]) -> bool:
    return any(has_variable(member.identity, JOB_FILE_VARIABLE) for member in members)


def parse_pairs(pairs: Iterable[gpu_pb2.GpuPair], held: Sequence[str]) -> tuple[GpuPair, ...]:
    """The pairs with their UUIDs in NVML's form.

    Raises:
        OperationError: INVALID_ARGUMENT, one is malformed or its source is not a GPU that is held.
    """
    parsed = tuple(GpuPair(normalize_uuid(pair.old_uuid), normalize_uuid(pair.new_uuid)) for pair in pairs)
    for pair in parsed:
        if pair.old_uuid not in held:
            gpus = ", ".join(held) or "no GPU"
            raise invalid(
                "pairs", f"the workload holds {gpus}, not {pair.old_uuid}: name a GPU that it holds"
            )
    return parsed


LOCK_TIMEOUT_LIMIT_S: Final = 7 * 86_400.0
"""A week, as the coordinator allows and docs/protocol.md says."""


def lock_timeout_s(operation: operation_pb2.SuspendOperation | operation_pb2.RemapOperation) -> float:
    """Time for submitted work to finish.

    Raises:
        OperationError: INVALID_ARGUMENT; 0 would mean "wait forever" to the driver.
    """
    if not operation.HasField("lock_timeout"):
        return DEFAULT_LOCK_TIMEOUT_S
    timeout_s = seconds(operation.lock_timeout)
    if not 0 < timeout_s <= LOCK_TIMEOUT_LIMIT_S:
        raise invalid(
            "lock_timeout",
            f"a lock timeout of {timeout_s:g} s is out of range: give more than 0 and at most "
            f"{LOCK_TIMEOUT_LIMIT_S:g} s",
        )
    return timeout_s
