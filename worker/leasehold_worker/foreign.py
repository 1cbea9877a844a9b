"""Who else is on this host's GPUs: processes that NVML lists and that belong to no workload with a lease.

A workload's own process is foreign on a GPU that nobody leases: it took no notice of its variables.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, final

import trio

from leasehold_worker.inventory import GpuUsage, Inventory
from leasehold_worker.leases import ForeignProcess
from leasehold_worker.pool import GpuPool
from leasehold_worker.processes import (
    ProcessIdentity,
    command_line,
    identify,
    lineage,
    user_id,
    user_name,
    variable_of,
    wait_ended,
)
from leasehold_worker.workloads import ENDED, WORKLOAD_ID_VARIABLE, Workload, Workloads

LOOK_INTERVAL_S: Final = 5.0
"""How old the view of who else is on the GPUs may be for a claim that is granted while it waits."""

ENDING_S: Final = 0.05
"""How long NVML may go on listing a process that has ended."""

LOOK_TIMEOUT_S: Final = 15.0
PROCESSES_LIMIT: Final = 16
"""Foreign processes of a GPU that are told: all of them might not fit into a frame."""

COMMAND_LIMIT: Final = 200
"""Characters of a foreign command line that are told."""


def owner(pid: int, workloads: Iterable[Workload]) -> Workload | None:
    """The workload that a process belongs to: by descent, by its session, or by its mark."""
    living = [workload for workload in workloads if workload.state not in ENDED]
    by_root = {workload.root: workload for workload in living}
    by_session: dict[int, Workload] = {workload.root.pid: workload for workload in living}
    for identity, session_id in lineage(pid):
        found = by_root.get(identity) or by_session.get(session_id)
        if found is not None:
            return found
    marked_id = variable_of(pid, WORKLOAD_ID_VARIABLE)
    return next((workload for workload in living if workload.workload_id == marked_id), None)


@final
class ForeignWatch:
    """Keeps the pool's view of foreign processes fresh."""

    def __init__(self, inventory: Inventory, pool: GpuPool) -> None:
        self._inventory = inventory
        self._pool = pool
        self._turn = trio.Lock()
        self._looks = 0

    async def run(self, workloads: Workloads) -> None:
        """Looks again and again, and as soon as a foreign process has ended, until cancelled."""
        while True:
            await self.look(workloads)
            with trio.move_on_after(LOOK_INTERVAL_S):
                async with trio.open_nursery() as nursery:
                    for identity in self._foreign_processes():
                        nursery.start_soon(_wait_ended, identity, nursery.cancel_scope)
                    await trio.sleep_forever()

    def _foreign_processes(self) -> list[ProcessIdentity]:
        slots = self._pool.snapshot_leases().slots
        found = (identify(process.pid) for slot in slots for process in slot.foreign)
        return [identity for identity in found if identity is not None]

    async def look(self, workloads: Workloads, leaving: Workload | None = None) -> None:
        """Looks at who is on the GPUs now. Callers that wait at the same time share one look.

        What NVML can't say stays as it was known.

        Args:
            workloads: Whose processes are ours.
            leaving: A workload that counts as gone.
        """
        begun = self._looks
        with trio.move_on_after(LOOK_TIMEOUT_S):
            async with self._turn:
                if self._looks > begun + 1 and leaving is None:
                    return
                self._looks += 1
                idle = self._unleased()
                usage = await self._usage()
                idle &= self._unleased()  # in between, a workload may have come or gone
                ours = [workload for workload in workloads.all() if workload is not leaving]
                self._pool.observe(_foreign(usage, ours, idle), _free_bytes(usage, self._pool))

    def _unleased(self) -> set[str]:
        return {slot.gpu_uuid for slot in self._pool.snapshot_leases().slots if slot.lease is None}

    async def _usage(self) -> Mapping[str, GpuUsage]:
        """Who uses which GPU. A process that is listed and not to be seen has just ended, or hides."""
        usage = await trio.to_thread.run_sync(self._inventory.usage, abandon_on_cancel=True)
        if all(user_id(pid) is not None for gpu in usage.values() for pid in gpu.processes):
            return usage
        await trio.sleep(ENDING_S)
        return await trio.to_thread.run_sync(self._inventory.usage, abandon_on_cancel=True)


async def _wait_ended(identity: ProcessIdentity, scope: trio.CancelScope) -> None:
    await wait_ended(identity)
    scope.cancel()


def _foreign(
    usage: Mapping[str, GpuUsage], ours: Iterable[Workload], idle: Collection[str]
) -> dict[str, tuple[ForeignProcess, ...]]:
    """Who is foreign on which GPU. On the idle ones, which nobody leases, everybody is."""
    ours = tuple(ours)
    pids = {pid for gpu in usage.values() for pid in gpu.processes}
    strangers = {pid for pid in pids if owner(pid, ours) is None}
    found: dict[str, tuple[ForeignProcess, ...]] = {}
    for gpu_uuid, gpu in usage.items():
        foreign = sorted(pid for pid in gpu.processes if pid in strangers or gpu_uuid in idle)
        found[gpu_uuid] = tuple(_describe(pid, gpu.processes[pid]) for pid in foreign[:PROCESSES_LIMIT])
    return found


def _describe(pid: int, size: int | None) -> ForeignProcess:
    command = " ".join(command_line(pid))[:COMMAND_LIMIT]
    return ForeignProcess(pid, user_name(user_id(pid)), command, size)


def _free_bytes(usage: Mapping[str, GpuUsage], pool: GpuPool) -> dict[str, int]:
    totals = {gpu.uuid: gpu.memory_bytes for gpu in pool.gpus}
    return {
        gpu_uuid: total - gpu.used_bytes
        for gpu_uuid, gpu in usage.items()
        if (total := totals.get(gpu_uuid)) is not None and gpu.used_bytes is not None
    }
