"""The GPUs of a restore or a remap: chosen, completed to a permutation, and checked."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, operation_pb2
from leasehold.v1.lease_pb2 import SlotState

from leasehold_worker.driver.device_memory import check_memory, fits
from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs, moved
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    LOCKED,
    RUNNING,
    Member,
    bytes_by_gpu,
    needed_by_gpu,
)
from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.gpus.facts import FreeMemory
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.gpus.uuids import normalize_uuid
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.leasing.refusals import ways_to_free
from leasehold_worker.planning.driver_checks import DriverChecks
from leasehold_worker.planning.plan import Destination, Plan, WorkloadPlan
from leasehold_worker.planning.workload_checks import parse_pairs

UNKNOWN_FREE: Final = "NVML does not report the free memory of {}, so it is unknown whether the workload fits"


@final
class Destinations:
    """Finds the GPUs for plans of one worker."""

    def __init__(self, inventory: Inventory, pool: GpuPool, driver_checks: DriverChecks) -> None:
        self._inventory = inventory
        self._pool = pool
        self._driver_checks = driver_checks

    def complete(self, plan: Plan, wanted: Sequence[GpuPair]) -> None:
        """One permutation serves all workloads: each GPU is leased to one of them."""
        plan.pairs = complete_pairs(wanted, self._inventory.chips)
        moves = {pair.old_uuid: pair.new_uuid for pair in plan.pairs}
        for target in plan.targets:
            target.destination = tuple(moves.get(gpu_uuid, gpu_uuid) for gpu_uuid in target.home)

    async def choose(self, plan: Plan, operation: operation_pb2.RestoreOperation) -> None:
        """Pairs each GPU of the workload with a new one."""
        target, findings = plan.target, plan.findings
        if (pairs := _where_some_run(target)) is not None:
            plan.pairs, target.destination = pairs, moved(target.home, pairs)
            return
        with findings.check("destinations", "a GPU for each"):
            if operation.pairs:
                named = parse_pairs(operation.pairs, target.home)
                moves = {pair.old_uuid: pair.new_uuid for pair in named}
                wanted = tuple(GpuPair(uuid, moves.get(uuid, uuid)) for uuid in target.home)
            elif operation.gpu_uuids:
                uuids = [normalize_uuid(uuid) for uuid in operation.gpu_uuids]
                if len(uuids) != len(target.home):
                    raise invalid(
                        "gpu_uuids",
                        f"the request names {len(uuids)} GPUs, and the workload held "
                        f"{len(target.home)}: name as many",
                    )
                wanted = tuple(map(GpuPair, target.home, uuids))
            else:
                wanted = await self._place(target, operation.hold_id)
            self.complete(plan, wanted)

    async def _place(self, target: WorkloadPlan, hold_id: str) -> tuple[GpuPair, ...]:
        if not set(target.home).issubset(target.workload.gpu_uuids):
            self._pool.slots.check_grants()
        spec = target.workload.spec
        usable = self._pool.holds.usable(hold_id, allow_foreign=spec.resources.allow_foreign)
        free = self._pool.unclaimed(
            allow_foreign=spec.resources.allow_foreign,
            for_helper=spec.HasField("helper") and target.workload.yielded,
        )
        room = await self._room(target.members)
        needed = needed_by_gpu(target.members, target.home)
        gpu_uuids = [*target.workload.gpu_uuids, *usable, *free]
        all_free = self._pool.slots.free(allow_foreign=spec.resources.allow_foreign)
        return choose_gpus(
            target.home,
            gpu_uuids,
            self._inventory.chips,
            room,
            needed,
            claimed=[gpu_uuid for gpu_uuid in all_free if gpu_uuid not in gpu_uuids],
            claims=len(self._pool.waiting),
            states={slot.gpu_uuid: slot.state for slot in self._pool.slots.snapshot().slots},
        )

    async def check(self, plan: Plan, held: Collection[str] = ()) -> None:
        """Checks whether the GPUs are free, have enough memory, and are visible to the members."""
        findings = plan.findings
        with findings.check("gpus", "free"):
            for target in plan.targets:
                wanted = [gpu_uuid for gpu_uuid in plan.to_reserve(target) if gpu_uuid not in held]
                self._pool.slots.check_free(
                    wanted,
                    allow_foreign=target.workload.spec.resources.allow_foreign,
                    held=self._pool.holds.gpus_of(plan.hold_id),
                    is_asleep=target.workload.is_asleep,
                )
                # Their holders keep cordoned and unhealthy GPUs, but nobody gets them.
                swapped = plan.swapped(target)
                self._pool.slots.check_free(swapped, allow_foreign=True, held=swapped)
        destinations = [gpu_uuid for target in plan.targets for gpu_uuid in target.destination]
        if plan.pairs:
            homes = {gpu_uuid for target in plan.targets for gpu_uuid in target.home}
            if elsewhere := [gpu_uuid for gpu_uuid in destinations if gpu_uuid not in homes]:
                await self._driver_checks.mig(findings, elsewhere)
            await self._driver_checks.device_nodes(findings, plan.members, destinations)
        resident = _resident_bytes(plan.members)
        room = await self._room(plan.members)
        for target in plan.targets:
            needed = needed_by_gpu(target.members, target.home)
            # The size after the framework has loaded the weights again.
            needed = {uuid: max(size, target.full_bytes.get(uuid, 0)) for uuid, size in needed.items()}
            for old, new in zip(target.home, target.destination, strict=True):
                # The memory that these workloads release is free before the restore.
                free = room.free_bytes
                free_then = {new: free[new] + resident.get(new, 0)} if new in free else {}
                plan.destinations.append(
                    Destination(new, self._inventory.chips.get(new, ""), free_then.get(new), needed.get(old))
                )
                with findings.about(target.workload):
                    if old in needed and new not in free and new not in room.shared:
                        findings.warn("device_memory", UNKNOWN_FREE.format(new))
                        continue
                    with findings.check("device_memory", f"enough on {new}"):
                        check_memory((GpuPair(old, new),), replace(room, free_bytes=free_then), needed)

    async def _room(self, members: Iterable[Member]) -> FreeMemory:
        pids = {member.identity.pid for member in members}
        return await trio.to_thread.run_sync(self._inventory.room, pids)


def stay_at_home(plan: Plan, operation: operation_pb2.RestoreOperation) -> None:
    """Restores a sleeping workload on the GPUs of its CUDA contexts."""
    target = plan.target
    with plan.findings.check("destinations", "those where its contexts are"):
        if operation.gpu_uuids or operation.pairs:
            raise invalid(
                "gpu_uuids",
                f"workload {target.workload.name} sleeps, and its CUDA contexts stay on its "
                "GPUs: restore it there, or suspend it by cuda_suspend first",
            )
        target.destination = target.home


def _where_some_run(target: WorkloadPlan) -> tuple[GpuPair, ...] | None:
    """Pairs to the GPUs of running members of an UNKNOWN workload. None: none on leased GPUs."""
    held = set(target.workload.gpu_uuids)
    for member in target.members:
        runs = member.state in (RUNNING, LOCKED)
        if runs and held.issuperset(moved(target.home, member.displacement)):
            return member.displacement
    return None


def _resident_bytes(members: Iterable[Member]) -> dict[str, int]:
    """Device memory of members, by the UUID of their current GPU."""
    total: dict[str, int] = {}
    for member in members:
        if member.state != CHECKPOINTED:
            there = moved(member.device_memory_bytes, member.displacement)
            for gpu_uuid, size in zip(there, member.device_memory_bytes.values(), strict=True):
                total[gpu_uuid] = total.get(gpu_uuid, 0) + size
    return total


def full_bytes(target: WorkloadPlan) -> dict[str, int]:
    """Device memory that a workload needs after a restore: its current or former bytes."""
    full = bytes_by_gpu(target.members)
    parked = target.workload.parked
    if parked is not None:
        for gpu_uuid, size in parked.device_memory_bytes.items():
            present = full.get(gpu_uuid, 0) if target.workload.is_asleep else 0
            full[gpu_uuid] = present + size
    return full


def choose_gpus(
    parked: Sequence[str],
    free: Sequence[str],
    chips: Mapping[str, str],
    room: FreeMemory,
    parked_bytes: Mapping[str, int],
    claimed: Collection[str] = (),
    claims: int = 0,
    states: Mapping[str, SlotState.ValueType] = MappingProxyType({}),
) -> tuple[GpuPair, ...]:
    """Pairs each GPU of a suspended workload with a new one: itself if free, else the first that fits.

    Args:
        parked: GPUs that the workload held, in its order.
        free: GPUs that can be claimed, in slot order.
        chips: Chip by UUID of every GPU of the host.
        room: Device memory as NVML reports it.
        parked_bytes: Device memory that the content of each GPU needs; missing if unknown.
        claimed: GPUs that are free, and reserved for waiting claims.
        claims: Number of waiting claims.
        states: State by UUID of GPUs, for the remedy.

    Raises:
        OperationError: NO_FREE_GPU if a GPU has no counterpart, INSUFFICIENT_DEVICE_MEMORY if all free ones
            are too small.
    """
    left = list(free)
    chosen = {uuid: uuid for uuid in parked if uuid in left and fits(GpuPair(uuid, uuid), room, parked_bytes)}
    left = [uuid for uuid in left if uuid not in chosen]
    for uuid in parked:
        if uuid in chosen:
            continue
        same_chip = [candidate for candidate in left if chips[candidate] == chips[uuid]]
        if not same_chip:
            kept = sum(chips[candidate] == chips[uuid] for candidate in claimed)
            alike = {state for other, state in states.items() if chips.get(other) == chips[uuid]}
            raise _no_free_gpu(uuid, chips[uuid], kept, claims, alike)
        fitting = [candidate for candidate in same_chip if fits(GpuPair(uuid, candidate), room, parked_bytes)]
        if not fitting:
            check_memory((GpuPair(uuid, same_chip[0]),), room, parked_bytes)
        chosen[uuid] = fitting[0]
        left.remove(fitting[0])
    return tuple(GpuPair(uuid, chosen[uuid]) for uuid in parked)


def _no_free_gpu(
    gpu_uuid: str, chip: str, kept: int, claims: int, states: Collection[SlotState.ValueType]
) -> OperationError:
    """The refusal of a GPU that no free GPU can replace. Waiting claims reserve ``kept`` free GPUs."""
    message = f"no free {chip} can replace {gpu_uuid}: {', or '.join(ways_to_free(states))}"
    if kept:
        waiting = "1 claim waits" if claims == 1 else f"{claims} claims wait"
        message = (
            f"{kept} {chip} free for {gpu_uuid}, reserved for earlier claims; {waiting}: "
            "wait until they have got GPUs, or name the GPUs with --to"
        )
    return OperationError(errors_pb2.ERROR_REASON_NO_FREE_GPU, message, {"gpu_uuid": gpu_uuid})
