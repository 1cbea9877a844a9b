"""What a command does to a workload: run, suspend, restore, remap, stop.

Suspending releases the lease, restoring claims again, and the map follows from where it lands. Destination
GPUs are reserved before anything is given up, and a lease changes hands only after the proof. Once the
driver has been asked to change something, an operation is finished or undone before a cancellation is
delivered.
"""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, final

import trio
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, lease_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker import proof
from leasehold_worker.checkpoint import group
from leasehold_worker.checkpoint.driver import Driver
from leasehold_worker.checkpoint.gpu_pairs import GpuPair, complete_pairs, normalize_uuid
from leasehold_worker.checkpoint.group import Group, Member, MemberOutcome
from leasehold_worker.checkpoint.process import DEFAULT_LOCK_TIMEOUT_S
from leasehold_worker.errors import OperationError
from leasehold_worker.inventory import Inventory
from leasehold_worker.placement import check_memory, choose_gpus
from leasehold_worker.pool import GpuPool, Lease
from leasehold_worker.preconditions import (
    REMAP_CUDA_VERSION,
    SUSPEND_CUDA_VERSION,
    invalid,
    is_plain_suspend,
    parse_pairs,
    require_alive,
    require_driver,
    require_host_memory,
    require_known_features,
    require_members,
    require_runnable,
    require_state,
)
from leasehold_worker.processes import is_alive, process_tree, send_signal
from leasehold_worker.workloads import ENDED, RUNNING, SUSPENDED, Parked, Workload, Workloads

DEFAULT_GRACE_S: Final = 10.0
KILL_WAIT_S: Final = 15.0
"""How long a killed workload may take to be gone."""


@dataclass(slots=True)
class Report:
    """What an operation tells while it runs, and what it leaves to tell: the fields of CommandResult."""

    on_phase: Callable[[str], None]
    already_there: bool = False
    outcomes: list[tuple[str, MemberOutcome]] = field(default_factory=list)
    applied_pairs: tuple[GpuPair, ...] = ()
    released_gpu_uuids: tuple[str, ...] = ()
    claimed_gpu_uuids: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)


@final
class Operations:
    """The operations over one worker's pool, workloads and driver."""

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        pool: GpuPool,
        workloads: Workloads,
        nursery: trio.Nursery,
    ) -> None:
        self._driver = driver
        self._inventory = inventory
        self._pool = pool
        self._workloads = workloads
        self._nursery = nursery

    async def run(self, workload_id: str, operation: command_pb2.RunOperation, report: Report) -> None:
        """Claims GPUs without waiting and starts the program on them."""
        spec = operation.spec
        if not spec.arguments:
            raise invalid("arguments", "a workload needs a program: give its arguments")
        require_known_features(spec)
        lease = self._claim_for_run(workload_id, operation)
        report.on_phase("spawn")
        try:
            await self._workloads.spawn(workload_id, operation.name, spec, lease, self._nursery)
        except BaseException:
            if lease is not None:
                self._pool.release(lease)
            raise
        report.claimed_gpu_uuids = lease.gpu_uuids if lease else ()

    async def suspend(
        self, workload_id: str, operation: command_pb2.SuspendOperation, report: Report
    ) -> None:
        """Locks and checkpoints the members, proves that the memory is free, and releases the lease."""
        workload = self._workloads.get(workload_id)
        if workload.state == SUSPENDED:
            report.already_there = True
            return
        require_state(workload, RUNNING, "suspended")
        policy = operation.policy if operation.HasField("policy") else workload.spec.eviction
        if not is_plain_suspend(policy):
            raise OperationError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                "this version parks by retain and cuda_suspend only: leave the policy out",
                {"field": "policy"},
            )
        require_driver(self._driver, SUSPEND_CUDA_VERSION)
        members = await self._find_members(workload)
        require_host_memory(sum(_bytes_by_gpu(members).values()))
        with trio.CancelScope(shield=True):
            parties = self._group(workload, members, report)
            self._workloads.set_state(workload, workload_pb2.WORKLOAD_STATE_SUSPENDING)
            try:
                await self._park(workload, parties, _lock_timeout_s(operation.lock_timeout), report)
            except OperationError as error:
                self._settle(workload, parties, RUNNING, error)
                raise
            require_alive(workload)
            workload.members = _members_after(parties)
            workload.parked = Parked(
                workload.lease.gpu_uuids if workload.lease else (),
                _bytes_by_gpu(members),
                workload_pb2.EvictionPolicy(
                    weight_strategy=workload_pb2.WEIGHT_STRATEGY_RETAIN,
                    process_strategy=workload_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
                ),
                datetime.now(UTC),
            )
            if workload.lease is not None:
                report.released_gpu_uuids = workload.lease.gpu_uuids
                self._pool.release(workload.lease)
                workload.lease = None
            self._workloads.set_state(workload, SUSPENDED)

    async def restore(
        self, workload_id: str, operation: command_pb2.RestoreOperation, report: Report
    ) -> None:
        """Reserves GPUs, restores the members there, proves it, and turns the reservation into a lease."""
        workload = self._workloads.get(workload_id)
        if workload.state == RUNNING and not operation.gpu_uuids and not operation.pairs:
            report.already_there = True
            return
        require_state(workload, SUSPENDED, "restored")
        if workload.parked is None:
            raise ValueError(f"workload {workload_id} is suspended, and nobody knows from where")
        parked = workload.parked
        free_bytes = await self._free_bytes()
        wanted = self._choose(parked, operation, free_bytes)
        pairs = complete_pairs(wanted, self._inventory.chips)
        if pairs:
            require_driver(self._driver, REMAP_CUDA_VERSION)
        reserved = self._pool.reserve_gpus(workload_id, [pair.new_uuid for pair in wanted])
        try:
            check_memory(wanted, free_bytes, parked.device_memory_bytes)
            members = [member for member in workload.members if is_alive(member.identity)]
            if len(members) < len(workload.members):
                report.warnings.append("some members ended while they were parked: they can't be restored")
            with trio.CancelScope(shield=True):
                parties = self._group(workload, members, report)
                self._workloads.set_state(workload, workload_pb2.WORKLOAD_STATE_RESTORING)
                try:
                    await self._wake(workload, parties, pairs, report)
                except OperationError as error:
                    workload.members = _members_after(parties)
                    self._settle(workload, parties, SUSPENDED, error)
                    raise
                restored = await proof.measured(self._inventory, _members_after(parties))
                require_alive(workload)
                self._pool.confirm(reserved)
                self._hold(workload, restored, reserved)
        except BaseException:
            self._pool.release(reserved)
            raise
        report.applied_pairs = pairs
        report.claimed_gpu_uuids = reserved.gpu_uuids

    async def remap(self, operation: command_pb2.RemapOperation, report: Report) -> None:
        """Moves a running workload: suspends it, restores it on its new GPUs, or else on its old ones."""
        if len(operation.moves) != 1:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                f"{len(operation.moves)} workloads can't be moved by one command: move one at a time",
            )
        move = operation.moves[0]
        workload = self._workloads.get(move.workload_id)
        require_state(workload, RUNNING, "remapped")
        if workload.lease is None:
            raise invalid("pairs", f"workload {workload.name} holds no GPU: there is nothing to move")
        held = workload.lease
        pairs = complete_pairs(parse_pairs(move.pairs, held.gpu_uuids), self._inventory.chips)
        moves = {pair.old_uuid: pair.new_uuid for pair in pairs}
        destination = [moves.get(gpu_uuid, gpu_uuid) for gpu_uuid in held.gpu_uuids]
        if destination == list(held.gpu_uuids):
            report.already_there = True
            return
        require_driver(self._driver, REMAP_CUDA_VERSION)
        reserved = self._pool.reserve_gpus(
            workload.workload_id, [uuid for uuid in destination if uuid not in held.gpu_uuids]
        )
        try:
            members = await self._find_members(workload)
            require_host_memory(sum(_bytes_by_gpu(members).values()))
            await self._check_destination(held, destination, members)
            with trio.CancelScope(shield=True):
                await self._move(workload, members, pairs, _lock_timeout_s(operation.lock_timeout), report)
                require_alive(workload)
                workload.lease = self._pool.exchange(held, reserved, destination)
        except BaseException:
            self._pool.release(reserved)
            raise
        self._workloads.set_state(workload, RUNNING)
        report.applied_pairs = pairs
        report.released_gpu_uuids = tuple(uuid for uuid in held.gpu_uuids if uuid not in destination)
        report.claimed_gpu_uuids = tuple(destination)

    async def stop(self, workload_id: str, operation: command_pb2.StopOperation, report: Report) -> None:
        """Sends SIGTERM to the first process, and SIGKILL to all after the grace.

        A parked workload is killed at once: its CUDA calls block, so it could not end by itself, and a
        checkpointed process is the one that can be killed safely (NVIDIA/cuda-checkpoint issue 53).
        """
        workload = self._workloads.get(workload_id)
        if workload.state in ENDED:
            report.already_there = True
            return
        parked = workload.state != RUNNING
        grace_s = operation.grace.ToTimedelta().total_seconds() if operation.HasField("grace") else None
        self._workloads.set_state(workload, workload_pb2.WORKLOAD_STATE_STOPPING)
        with trio.CancelScope(shield=True):
            report.on_phase("terminate")
            if not parked:
                send_signal(workload.root, signal.SIGTERM)
                with trio.move_on_after(DEFAULT_GRACE_S if grace_s is None else grace_s):
                    await workload.ended.wait()
            if not workload.ended.is_set():
                report.on_phase("kill")
                for identity in process_tree(workload.root):
                    send_signal(identity, signal.SIGKILL)
            with trio.move_on_after(KILL_WAIT_S):
                await workload.ended.wait()
        if not workload.ended.is_set():
            self._workloads.set_state(workload, workload_pb2.WORKLOAD_STATE_UNKNOWN)
            raise OperationError(
                errors_pb2.ERROR_REASON_DRIVER_ERROR,
                f"workload {workload.name} did not end within {KILL_WAIT_S:g} s of SIGKILL: it is stuck in "
                "the kernel, and its GPUs stay leased",
            )

    def _claim_for_run(self, workload_id: str, operation: command_pb2.RunOperation) -> Lease | None:
        count = operation.spec.resources.gpu_count
        if operation.gpu_uuids:
            return self._pool.claim_gpus(workload_id, [normalize_uuid(uuid) for uuid in operation.gpu_uuids])
        if count == 0:
            return None
        lease = self._pool.try_claim(workload_id, count)
        if lease is None:
            free = sum(slot.state == lease_pb2.SLOT_STATE_FREE for slot in self._pool.snapshot_leases())
            raise OperationError(
                errors_pb2.ERROR_REASON_NO_FREE_GPU,
                f"{count} GPUs are wanted and {free} of {self._pool.capacity} are free: suspend or stop a "
                "workload, or choose another worker",
                {"field": "gpu_count"},
            )
        return lease

    def _group(self, workload: Workload, members: Sequence[Member], report: Report) -> Group:
        sequential = workload.spec.member_order == workload_pb2.MEMBER_ORDER_SEQUENTIAL
        parties = Group(self._driver, members, sequential=sequential, on_phase=report.on_phase)
        report.outcomes.extend((workload.workload_id, outcome) for outcome in parties.outcomes)
        return parties

    async def _find_members(self, workload: Workload) -> tuple[Member, ...]:
        """The workload's CUDA processes, found afresh and measured, all of them RUNNING.

        Raises:
            OperationError: There is none, or one can't be suspended.
        """
        processes = process_tree(workload.root)
        require_runnable(workload, processes)
        members = await group.find_members(self._driver, processes)
        require_members(workload, members)
        return await proof.measured(self._inventory, members)

    async def _park(self, workload: Workload, parties: Group, lock_timeout_s: float, report: Report) -> None:
        async def rescan() -> tuple[Member, ...]:
            return await group.find_members(self._driver, process_tree(workload.root))

        await parties.suspend(lock_timeout_s, rescan)
        report.on_phase("verify")
        try:
            await proof.prove_freed(self._inventory, [outcome.member for outcome in parties.outcomes])
        except OperationError:
            await parties.roll_back()
            raise

    async def _wake(
        self, workload: Workload, parties: Group, pairs: tuple[GpuPair, ...], report: Report
    ) -> None:
        await parties.restore(pairs)
        report.on_phase("verify")
        members = [outcome.member for outcome in parties.outcomes]
        if not all(member.device_memory_bytes for member in members):
            report.warnings.append("NVML lists no memory for some members: where they run is not proved")
        try:
            await proof.prove_placed(
                self._inventory, members, {pair.old_uuid: pair.new_uuid for pair in pairs}
            )
        except OperationError:
            await parties.roll_back()
            for outcome in parties.outcomes:
                outcome.displacement = ()  # NVML has shown that the driver moved nothing
            raise

    async def _move(
        self,
        workload: Workload,
        members: tuple[Member, ...],
        pairs: tuple[GpuPair, ...],
        lock_timeout_s: float,
        report: Report,
    ) -> None:
        parties = self._group(workload, members, report)
        self._workloads.set_state(workload, workload_pb2.WORKLOAD_STATE_REMAPPING)
        try:
            await self._park(workload, parties, lock_timeout_s, report)
            try:
                await self._wake(workload, parties, pairs, report)
            except OperationError:
                report.warnings.append("it could not be restored on the new GPUs, so it went back to the old")
                await parties.restore(())
                raise
        except OperationError as error:
            self._settle(workload, parties, RUNNING, error)
            raise
        workload.members = await proof.measured(self._inventory, _members_after(parties))

    def _hold(self, workload: Workload, members: tuple[Member, ...], lease: Lease) -> None:
        workload.members = members
        workload.parked = None
        workload.lease = lease
        self._workloads.set_state(workload, RUNNING)

    def _settle(
        self, workload: Workload, parties: Group, before: WorkloadState.ValueType, error: OperationError
    ) -> None:
        """Names the state after an operation that failed: the one before it, or what could not be saved."""
        states = {outcome.state_after for outcome in parties.outcomes}
        back = group.RUNNING if before == RUNNING else group.CHECKPOINTED
        workload.members = _members_after(parties)
        if states <= {back, group.GONE}:
            self._workloads.set_state(workload, before)
            return
        workload.error = error
        wedged = bool(states & {group.WEDGED, workload_pb2.MEMBER_STATE_FAILED})
        self._workloads.set_state(
            workload, workload_pb2.WORKLOAD_STATE_WEDGED if wedged else workload_pb2.WORKLOAD_STATE_UNKNOWN
        )

    def _choose(
        self, parked: Parked, operation: command_pb2.RestoreOperation, free_bytes: Mapping[str, int]
    ) -> tuple[GpuPair, ...]:
        """Pairs each GPU that was held with the one to wake on."""
        if operation.pairs:
            moves = {pair.old_uuid: pair.new_uuid for pair in parse_pairs(operation.pairs, parked.gpu_uuids)}
            return tuple(GpuPair(uuid, moves.get(uuid, uuid)) for uuid in parked.gpu_uuids)
        if operation.gpu_uuids:
            wanted = [normalize_uuid(uuid) for uuid in operation.gpu_uuids]
            if len(wanted) != len(parked.gpu_uuids):
                raise invalid(
                    "gpu_uuids",
                    f"{len(wanted)} GPUs are named, and the workload held {len(parked.gpu_uuids)}",
                )
            return tuple(map(GpuPair, parked.gpu_uuids, wanted))
        free = [
            slot.gpu_uuid for slot in self._pool.snapshot_leases() if slot.state == lease_pb2.SLOT_STATE_FREE
        ]
        return choose_gpus(
            parked.gpu_uuids, free, self._inventory.chips, free_bytes, parked.device_memory_bytes
        )

    async def _check_destination(
        self, held: Lease, destination: Sequence[str], members: Sequence[Member]
    ) -> None:
        own = _bytes_by_gpu(members)
        free_bytes = await self._free_bytes()
        # What the workload itself gives up is free by the time that it is restored.
        free_then = {uuid: free + own.get(uuid, 0) for uuid, free in free_bytes.items()}
        check_memory(tuple(map(GpuPair, held.gpu_uuids, destination)), free_then, own)

    async def _free_bytes(self) -> dict[str, int]:
        readings = await trio.to_thread.run_sync(self._inventory.read)
        return {
            uuid: reading.memory_free_bytes
            for uuid, reading in readings.items()
            if reading.memory_free_bytes is not None
        }


def _bytes_by_gpu(members: Iterable[Member]) -> dict[str, int]:
    total: dict[str, int] = {}
    for member in members:
        for gpu_uuid, used_bytes in member.device_memory_bytes.items():
            total[gpu_uuid] = total.get(gpu_uuid, 0) + used_bytes
    return total


def _members_after(parties: Group) -> tuple[Member, ...]:
    return tuple(outcome.member_after() for outcome in parties.outcomes)


def _lock_timeout_s(duration: duration_pb2.Duration) -> float:
    seconds = duration.ToTimedelta().total_seconds()
    return seconds if seconds > 0 else DEFAULT_LOCK_TIMEOUT_S
