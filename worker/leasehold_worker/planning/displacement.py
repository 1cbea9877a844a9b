"""Members of a workload on GPUs that it does not lease.

A move changes the GPUs of processes but not their environment. A child that a moved process starts still
reads the first CUDA_VISIBLE_DEVICES, and begins on the old GPU. Such a member counts as displaced from the
GPU that replaced the old one, so that a restore or a remap brings it there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs
from leasehold_worker.driver.members import RUNNING, Member
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import GpuUsage
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.processes import ProcessIdentity, is_alive, variable_of
from leasehold_worker.planning.findings import Findings
from leasehold_worker.planning.plan import Plan

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

CHILDREN_OF_MOVED = (
    "new processes of workload {} still inherit its first CUDA_VISIBLE_DEVICES, so they use "
    "CUDA on the old GPUs, without a lease"
)


def is_elsewhere(
    processes: Sequence[ProcessIdentity], held: Collection[str], usage: Mapping[str, GpuUsage]
) -> bool:
    """Whether NVML lists one of the processes on a GPU that its workload does not hold."""
    pids = {identity.pid for identity in processes}
    return any(gpu_uuid not in held and pids & gpu.processes.keys() for gpu_uuid, gpu in usage.items())


async def warnings_of_children(plan: Plan) -> list[str]:
    """Warnings about processes that workloads start after the moves of a plan.

    A workload that holds the GPUs of its first CUDA_VISIBLE_DEVICES afterwards, in any order, needs none.
    """
    if not plan.pairs:
        return []
    gpu_uuids = {pair.old_uuid for pair in plan.pairs}  # all of the host
    warnings: list[str] = []
    for target in plan.targets:
        first = set((await _visible_devices(target.workload.root)).split(","))
        # An adopted program may name its GPUs otherwise, or not at all.
        former = first if first <= gpu_uuids else set(target.home)
        if former != set(target.destination):
            warnings.append(CHILDREN_OF_MOVED.format(target.workload.name))
    return warnings


async def _visible_devices(root: ProcessIdentity) -> str:
    """The first CUDA_VISIBLE_DEVICES of a process. Empty: it has none, has ended, or can't be read."""
    if not is_alive(root):
        return ""
    try:
        return await read_process(root.pid, partial(variable_of, root.pid, VISIBLE_VARIABLE))
    except OperationError:
        return ""


async def find_displaced(
    members: Sequence[Member], home: Sequence[str], chips: Mapping[str, str], findings: Findings
) -> tuple[Member, ...]:
    """As :func:`displaced`, in a thread.

    Raises:
        OperationError: As for :func:`displaced`; TARGET_NOT_RUNNABLE: a member can't be read.
    """
    if not any(_is_strange(member, home) for member in members):
        await trio.lowlevel.checkpoint()
        return tuple(members)
    look = partial(displaced, members, home, chips, findings)
    return await read_process(members[0].identity.pid, look)


def displaced(
    members: Sequence[Member], home: Sequence[str], chips: Mapping[str, str], findings: Findings
) -> tuple[Member, ...]:
    """The members; those on GPUs that the workload does not hold count as displaced.

    Args:
        members: The members, measured. Reading them may block.
        home: GPUs that the workload holds, in its order.
        chips: Chip name by UUID of every GPU of the host.
        findings: Receives a warning for each displaced member.

    Raises:
        OperationError: REMAP_NOT_APPLIED, it is unknown which GPU replaced one in use.
    """
    return tuple(_displaced(member, home, chips, findings) for member in members)


def _is_strange(member: Member, home: Sequence[str]) -> bool:
    """Whether a running member is on a GPU that its workload does not hold, while that holds others."""
    return bool(home) and member.state == RUNNING and not set(member.gpu_uuids) <= set(home)


def _displaced(member: Member, home: Sequence[str], chips: Mapping[str, str], findings: Findings) -> Member:
    if not _is_strange(member, home):
        return member
    used = member.gpu_uuids
    strange = [gpu_uuid for gpu_uuid in used if gpu_uuid not in home]
    pid, names = member.identity.pid, ", ".join(strange)
    started_with = variable_of(pid, VISIBLE_VARIABLE).split(",")
    if len(started_with) != len(home) or not set(used) <= set(started_with):
        raise OperationError(
            errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED,
            f"process {pid} uses {names}, which its workload neither leases nor had at its start: end it",
            {"pid": str(pid), "gpu_uuid": strange[0]},
        )
    old = dict(zip(started_with, home, strict=True))
    findings.warn(
        "leased_gpus",
        f"process {pid} uses {names}, which its workload does not lease: the next restore or "
        "remap moves the process to a GPU of the lease",
    )
    return replace(
        member,
        device_memory_bytes={old[gpu_uuid]: size for gpu_uuid, size in member.device_memory_bytes.items()},
        gpu_uuids=tuple(old[gpu_uuid] for gpu_uuid in used),
        displacement=complete_pairs([GpuPair(old[gpu_uuid], gpu_uuid) for gpu_uuid in used], chips),
    )
