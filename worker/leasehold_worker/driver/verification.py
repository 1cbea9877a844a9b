"""Verification of the driver by NVML: a process is listed on exactly the GPUs that it holds.

The driver may report success without any effect (NVIDIA/cuda-checkpoint issue 53).
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.driver.gpu_pairs import GpuPair, moved
from leasehold_worker.driver.members import CHECKPOINTED, Member, bytes_by_gpu
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import GpuUsage, Inventory
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 5.0
"""Time for NVML to follow the driver."""

POLL_INTERVAL_S: Final = 0.02

Found = TypeVar("Found")
Usage = Mapping[str, GpuUsage]


@dataclass(frozen=True, slots=True)
class Before:
    """The answers of NVML before a suspend.

    Attributes:
        members: The members to suspend, measured.
        pids: All processes of their workloads: none may have device memory afterwards.
        usage: The memory of all GPUs.
    """

    members: Sequence[Member]
    pids: Collection[int]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Occupancy:
    """GPUs on which members of a workload may have memory, according to NVML.

    Attributes:
        listed: UUIDs of the GPUs on which NVML lists a member.
        unread: UUIDs of the GPUs whose processes NVML can't list, such as a GPU that is lost.
    """

    listed: set[str]
    unread: set[str]


@final
class Verification:
    """Queries NVML until it agrees with the driver, or a timeout."""

    def __init__(self, inventory: Inventory, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._inventory = inventory
        self._timeout_s = timeout_s

    async def usage(self) -> Usage:
        """The current usage of the GPUs."""
        return await run_in_thread(self._inventory.usage)

    async def measured(self, members: Sequence[Member], home: Sequence[str] = ()) -> tuple[Member, ...]:
        """The members of one workload, with their current sizes as in :func:`sized`."""
        return sized(members, await self.usage(), home)

    async def kept_bytes(
        self, members: Sequence[Member], gpu_uuids: Collection[str]
    ) -> dict[str, int | None]:
        """Memory that the members have on GPUs, or the memory of all processes if NVML reports no sizes.

        None: unknown to NVML.
        """
        usage = await self.usage()
        pids = [member.identity.pid for member in members]
        hidden = any(all(pid not in gpu.processes for gpu in usage.values()) for pid in pids)
        kept: dict[str, int | None] = {}
        for gpu_uuid in gpu_uuids:
            gpu = usage.get(gpu_uuid)
            kept[gpu_uuid] = None if gpu is None else gpu.used_bytes if hidden else gpu.held_bytes(pids)
        return kept

    async def listed_gpus(self, members: Sequence[Member]) -> set[str]:
        """UUIDs of the GPUs on which NVML lists one of the members."""
        return _listed(members, await self.usage())

    async def occupancy(self, members: Sequence[Member]) -> Occupancy:
        """GPUs on which the members may have memory, after NVML had time to drop suspended members.

        Without an answer, such as for lack of threads, no GPU is read. So a shortage frees no GPU.
        """
        parked = {member.identity.pid for member in members if member.state == CHECKPOINTED}
        usage: Usage = {}
        try:
            usage, _ = await self._poll(
                lambda now: [pid for gpu in now.values() for pid in gpu.processes if pid in parked]
            )
        except (OSError, RuntimeError) as error:
            logger.warning("NVML can't be asked where processes are: %s", error)
        return Occupancy(_listed(members, usage), self._inventory.chips.keys() - usage.keys())

    async def prove_freed(self, before: Before, now: Usage) -> Usage:
        """Waits until NVML lists none of the processes, and their memory is free.

        Args:
            before: The answers before the suspend.
            now: A later answer, which may be evidence enough.

        Returns:
            The answer that is the evidence.

        Raises:
            OperationError: MEMORY_NOT_FREED.
        """
        if not not_freed(before, now):
            await trio.lowlevel.checkpoint()
            return now
        usage, left = await self._poll(partial(not_freed, before))
        if left:
            raise left[0]
        return usage

    async def prove_placed(self, members: Sequence[Member], pairs: Sequence[GpuPair]) -> None:
        """Waits until NVML lists every member on exactly the GPUs of the pairs.

        Args:
            members: Measured before the pairs moved them.
            pairs: Empty: all stayed.

        Raises:
            OperationError: REMAP_NOT_APPLIED, a member is on another GPU.
        """

        def misplaced(now: Usage) -> list[tuple[int, set[str], set[str]]]:
            found: list[tuple[int, set[str], set[str]]] = []
            for member in members:
                pid = member.identity.pid
                wanted = placed(member, pairs)
                actual = {gpu_uuid for gpu_uuid, gpu in now.items() if pid in gpu.processes}
                if wanted and wanted != actual:
                    found.append((pid, wanted, actual))
            return found

        _, wrong = await self._poll(misplaced)
        if wrong:
            pid, wanted, actual = wrong[0]
            raise OperationError(
                errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED,
                f"the driver reports process {pid} as restored, but NVML lists it on "
                f"{', '.join(sorted(actual)) or 'no GPU'} and not on "
                f"{', '.join(sorted(wanted))}: try again, or update the driver",
                {"pid": str(pid)},
            )

    async def _poll(self, wrong: Callable[[Usage], list[Found]]) -> tuple[Usage, list[Found]]:
        """Reads NVML until it agrees: the last reading, with the remaining problem at the deadline."""
        deadline = trio.current_time() + self._timeout_s
        while True:
            usage = await self.usage()
            found = wrong(usage)
            if not found or trio.current_time() >= deadline:
                return usage, found
            await trio.sleep(POLL_INTERVAL_S)


def not_freed(before: Before, now: Usage) -> list[OperationError]:
    """Why suspended memory is not free. None: it is."""
    return _still_listed(before.pids, now) or _unread(before, now) or _not_fallen(before, now)


def sized(members: Sequence[Member], usage: Usage, home: Sequence[str] = ()) -> tuple[Member, ...]:
    """The members of one workload, with their GPUs and device memory.

    NVML can list a process without its size, and in a container with its own process namespace it lists none.
    Memory of such a GPU that belongs to no listed process then counts for one member. This is rather too much
    than too little: a restore that runs out of device memory wedges the process forever.

    Args:
        members: The members.
        usage: The usage of the GPUs.
        home: GPUs of their workload, which count as theirs if NVML lists none of them.
    """
    sizes = [
        {uuid: gpu.processes[pid] for uuid, gpu in usage.items() if pid in gpu.processes}
        for pid in (member.identity.pid for member in members)
    ]
    listed = [tuple(mine) for mine in sizes]
    if sizes and not any(listed):
        sizes[0] = dict.fromkeys(uuid for uuid in home if uuid in usage)
    for gpu_uuid, gpu in usage.items():
        left = _unaccounted_bytes(gpu)
        for mine in sizes:
            if gpu_uuid in mine and mine[gpu_uuid] is None:
                mine[gpu_uuid], left = left, left and 0
    return tuple(
        replace(
            member,
            device_memory_bytes={uuid: size for uuid, size in mine.items() if size is not None},
            gpu_uuids=gpu_uuids,
        )
        for member, mine, gpu_uuids in zip(members, sizes, listed, strict=True)
    )


def freed_usage(pids: Collection[int], then: Usage, now: Usage) -> Usage:
    """The memory that a suspend freed on each GPU, for :func:`sized`.

    If other processes use the GPU, or less than half of its memory became free, the memory from before
    counts: NVML may lag, and another process may have allocated memory meanwhile.
    """
    freed: dict[str, GpuUsage] = {}
    for gpu_uuid, gpu in then.items():
        after = now.get(gpu_uuid)
        freed[gpu_uuid] = gpu
        if after is None or gpu.used_bytes is None or after.used_bytes is None:
            continue
        fallen_bytes = gpu.used_bytes - after.used_bytes
        alone = not (gpu.processes.keys() | after.processes.keys()) - set(pids)
        if alone and 2 * fallen_bytes >= gpu.used_bytes:
            freed[gpu_uuid] = GpuUsage(fallen_bytes, gpu.processes)
    return freed


def placed(member: Member, displacement: Sequence[GpuPair]) -> set[str]:
    """GPUs of a member after the pairs have moved it."""
    return set(moved(member.gpu_uuids, displacement))


def _unaccounted_bytes(gpu: GpuUsage) -> int | None:
    """Memory in use that belongs to no process with a known size. None: unknown to NVML."""
    if gpu.used_bytes is None:
        return None
    return max(0, gpu.used_bytes - sum(size for size in gpu.processes.values() if size is not None))


def _listed(members: Sequence[Member], usage: Usage) -> set[str]:
    pids = {member.identity.pid for member in members}
    return {gpu_uuid for gpu_uuid, gpu in usage.items() if pids & gpu.processes.keys()}


def _still_listed(pids: Collection[int], now: Usage) -> list[OperationError]:
    return [
        OperationError(
            errors_pb2.ERROR_REASON_MEMORY_NOT_FREED,
            "the driver reports the workload as checkpointed, but NVML still lists its "
            f"process {pid} on {gpu_uuid}: try again, or update the driver",
            {"pid": str(pid), "gpu_uuid": gpu_uuid},
        )
        for gpu_uuid, gpu in now.items()
        for pid in gpu.processes
        if pid in pids
    ]


def _unread(before: Before, now: Usage) -> list[OperationError]:
    """GPUs that members left, and whose processes NVML could list before and can't list now."""
    left: set[str] = set()
    for member in before.members:
        if member.state != CHECKPOINTED:
            left.update(placed(member, member.displacement))
            left.update(moved(member.device_memory_bytes, member.displacement))
    return [
        OperationError(
            errors_pb2.ERROR_REASON_MEMORY_NOT_FREED,
            "the driver reports the workload as checkpointed, but NVML can't list the processes of "
            f"{gpu_uuid} any more: see the kernel's log for errors of the GPU, and try again",
            {"gpu_uuid": gpu_uuid},
        )
        for gpu_uuid in sorted(left - now.keys())
    ]


def _not_fallen(before: Before, now: Usage) -> list[OperationError]:
    """GPUs whose used memory fell by less than half of the suspended memory, with no listed user."""
    errors: list[OperationError] = []
    for gpu_uuid, parked_bytes in bytes_by_gpu(before.members).items():
        then, after = before.usage.get(gpu_uuid), now.get(gpu_uuid)
        if then is None or after is None or then.used_bytes is None or after.used_bytes is None:
            continue
        unexplained_then, unexplained_now = then.unexplained_bytes, after.unexplained_bytes
        if unexplained_then is None or unexplained_now is None:
            continue
        fallen = then.used_bytes - after.used_bytes >= parked_bytes / 2
        if not fallen and unexplained_now - unexplained_then >= parked_bytes / 2:
            errors.append(
                OperationError(
                    errors_pb2.ERROR_REASON_MEMORY_NOT_FREED,
                    f"the driver reports {size_text(parked_bytes)} as suspended, but "
                    f"{gpu_uuid} has {size_text(after.used_bytes)} in use, and had "
                    f"{size_text(then.used_bytes)} before: see nvidia-smi for the processes "
                    "on it, or update the driver",
                    {"gpu_uuid": gpu_uuid},
                )
            )
    return errors
