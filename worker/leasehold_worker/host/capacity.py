"""The capacity of the host: CPU time and memory that the kernel allows this worker, and disk."""

import os
from dataclasses import dataclass

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.errors import StartError
from leasehold_worker.host import cgroups, processes


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Resources of all workloads together.

    Attributes:
        cpu_millicores: CPU time in thousandths of a core.
        memory_bytes: Host memory.
    """

    cpu_millicores: int
    memory_bytes: int


def hard_limits() -> HostLimits:
    """The host's CPU and memory, or the lower limits of the worker's CPU set and control groups."""
    cpus = [len(os.sched_getaffinity(0)) * 1000]
    memory = [processes.memory_bytes("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if (cpu_limit := cgroups.cpu_limit_millicores(os.getpid())) is not None:
        cpus.append(cpu_limit)
    if (memory_limit := cgroups.memory_limit_bytes(os.getpid())) is not None:
        memory.append(memory_limit)
    return HostLimits(min(cpus), min(memory))


def limits_within(hard: HostLimits, cpu_limit_millicores: int = 0, memory_limit_bytes: int = 0) -> HostLimits:
    """The limits of the configuration, or the host's.

    Args:
        hard: Limits of the host and its control groups.
        cpu_limit_millicores: CPU time of all workloads. 0: all of it.
        memory_limit_bytes: Memory of all workloads. 0: all of it.

    Raises:
        StartError: A limit exceeds the host's.
    """
    if cpu_limit_millicores > hard.cpu_millicores:
        raise StartError(
            f"cpu_limit_millicores {cpu_limit_millicores} is more than the {hard.cpu_millicores} that this "
            "host and its control groups allow: give that at most, or 0 for all"
        )
    if memory_limit_bytes > hard.memory_bytes:
        raise StartError(
            f"memory_limit {size_text(memory_limit_bytes)} is more than the {size_text(hard.memory_bytes)} "
            f"that this host and its control groups allow: give {hard.memory_bytes} at most, or 0 for all"
        )
    return HostLimits(cpu_limit_millicores or hard.cpu_millicores, memory_limit_bytes or hard.memory_bytes)
