"""Members down and up, with their workloads' hooks, leases and images: what operations are made of.

Destination GPUs are reserved before anything is given up, and a lease changes hands only after the proof. A
cancellation undoes it; past the point of no return, which is the first call that moves device memory back or
the image that is complete, it is finished.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.commands.intents import Intent, WorkloadIntent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    RUNNING,
    Member,
    MemberOutcome,
    Search,
    are_unlisted,
    members_after,
    search_members,
)
from leasehold_worker.driver.process import DEFAULT_LOCK_TIMEOUT_S
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.driver.verification import Before, Usage, Verification, freed_usage, placed, sized
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.shared_libraries import loaded_library
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.leasing.suspend_memory import SuspendMemory
from leasehold_worker.operations.settlement import (
    Settlement,
    StoredCheckpoint,
    settle_state,
    where_members_are,
)
from leasehold_worker.operations.workload_hooks import HookFactory, OperationHooks
from leasehold_worker.overlap import both
from leasehold_worker.planning.displacement import find_displaced
from leasehold_worker.planning.findings import Findings
from leasehold_worker.planning.plan import Plan
from leasehold_worker.planning.workload_checks import is_sequential, require_alive, require_open
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import REMAPPING, RESTORING, SUSPENDING
from leasehold_worker.workloads.workload import Workload, home_of, parked_bytes

STALE_BUS_ID: Final = (
    "a process of the workload has loaded NCCL: communicators that are made after this move may fail, as the "
    "driver may tell the PCI bus id of the old GPU; if they do, run the workload again"
)
"""NVIDIA/cuda-checkpoint issue 48."""

NCCL: Final = "libnccl.so"
LIBRARIES_TIMEOUT_S: Final = 2.0
"""How long it may take to read what members have loaded. Members that can't be read in time may use NCCL."""

_CANCELLED: Final = OperationError(errors_pb2.ERROR_REASON_CANCELLED, "it was cancelled, and undone")

Keep = Callable[[Plan, Progress], Awaitable[StoredCheckpoint]]
"""Puts the parked processes of a plan on disk; they have ended when it returns, and go on when it raises."""


class _Found(NamedTuple):
    searches: tuple[Search, ...]
    """One for each workload, with its members."""
    pids: frozenset[int]
    """All processes of the workloads, then and now."""

    def members(self, usage: Usage) -> tuple[Member, ...]:
        """The members that the workloads have now.

        Args:
            usage: What NVML said while the members were locked.

        Raises:
            OperationError: A process that may use CUDA can't be traced.
        """
        for search in self.searches:
            require_open(search, usage)
        return tuple(member for search in self.searches for member in search.members)


@final
class CudaSuspend:
    """Takes the members of one host's workloads down and up."""

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        pool: GpuPool,
        workloads: Workloads,
        hook_factory: HookFactory,
        *,
        rates: Rates,
        host_memory: SuspendMemory,
        verification: Verification,
    ) -> None:
        self._driver = driver
        self._inventory = inventory
        self._pool = pool
        self._workloads = workloads
        self._hook_factory = hook_factory
        self._rates = rates
        self._host_memory = host_memory
        self._verification = verification

    def reserve(self, plan: Plan) -> list[Lease]:
        """Reserves what the plan takes and nobody of it holds, all or nothing.

        Raises:
            OperationError: NO_FREE_GPU, and nothing is reserved.
        """
        reserved: list[Lease] = []
        try:
            for target in plan.targets:
                if gpu_uuids := plan.to_reserve(target):
                    reserved.append(
                        self._pool.reserve_gpus(
                            target.workload.workload_id,
                            gpu_uuids,
                            allow_foreign=target.workload.spec.resources.allow_foreign,
                        )
                    )
        except OperationError:
            self.release(reserved)
            raise
        return reserved

    def release(self, reserved: Sequence[Lease]) -> None:
        """Gives back what was reserved; what was used has been exchanged, and is not released by this."""
        for lease in reserved:
            self._pool.release(lease)

    async def park(
        self,
        plan: Plan,
        progress: Progress,
        lock_timeout_s: float,
        keep: Keep | None = None,
    ) -> None:
        """Takes the members of a workload down, and then to disk if that is wanted; or undoes it.

        Args:
            plan: What is to be done.
            progress: What is told.
            lock_timeout_s: How long submitted work may take to drain.
            keep: Puts the parked processes on disk.

        Raises:
            OperationError: It failed, and the workload is as before as far as the report says.
        """
        await self._go_down(plan, SUSPENDING, [], progress, lock_timeout_s, keep)

    async def wake(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Brings the members of a workload up on GPUs that were reserved; or undoes it.

        Members that are where they must not be are parked first, as if they were moved.

        Raises:
            OperationError: It failed, and the workload is as before as far as the report says.
        """
        if plan.astray:
            await self.remap(plan, reserved, progress, DEFAULT_LOCK_TIMEOUT_S)
            return
        try:
            self._set_states(plan, RESTORING)
            await self._move(plan, RESTORING, reserved, progress, DEFAULT_LOCK_TIMEOUT_S)
        finally:
            self.release(reserved)

    async def remap(
        self, plan: Plan, reserved: Sequence[Lease], progress: Progress, lock_timeout_s: float
    ) -> None:
        """Takes members down, and up on other GPUs, or else on the old ones."""
        try:
            await self._go_down(plan, REMAPPING, reserved, progress, lock_timeout_s)
        finally:
            self.release(reserved)

    def _set_states(self, plan: Plan, state: WorkloadState.ValueType) -> None:
        for target in plan.targets:
            self._workloads.set_state(target.workload, state)

    async def _go_down(
        self,
        plan: Plan,
        state: WorkloadState.ValueType,
        reserved: Sequence[Lease],
        progress: Progress,
        lock_timeout_s: float,
        keep: Keep | None = None,
    ) -> None:
        """Calls the hooks, and moves what they leave; both are undone where it fails."""
        before = [(target.workload, target.workload.state) for target in plan.targets]
        operation_hooks = self._hook_factory.operation_hooks(plan.targets, plan.policy, progress)
        self._set_states(plan, state)
        called = False
        try:
            # Before the hooks: they may move weights to host memory, too.
            for target in plan.targets:
                moved_bytes = sum(m.total_bytes for m in target.members if m.state != CHECKPOINTED)
                self._workloads.limit_memory(target.workload, moved_bytes + parked_bytes(target.workload))
            if operation_hooks.is_needed and not plan.is_parked:
                await self.call_down(plan, operation_hooks, reserved, progress)
                called = True
            plan.require_sizes()
            with self._host_memory.charged(plan.bytes_by_pid, parks=plan.stays_in_memory):
                await self._move(plan, state, reserved, progress, lock_timeout_s, keep)
        except BaseException:
            with trio.CancelScope(shield=True):
                if called and any(not target.workload.parked for target in plan.targets):
                    await operation_hooks.back()
                for workload, former in before:
                    if workload.state == state:
                        self._workloads.limit_memory(workload, parked_bytes(workload))
                        self._workloads.set_state(workload, former)
            raise

    async def members_of(self, workload: Workload) -> tuple[Member, ...]:
        """The members of a workload as they are now, measured."""
        search = await search_members(self._driver, await workload.find_processes())
        usage = await self._verification.usage()
        require_open(search, usage)
        held = workload.lease.gpu_uuids if workload.lease is not None else ()
        # Members on GPUs without a lease are to come home; the plan has warned of them.
        return await find_displaced(
            sized(search.members, usage, home_of(workload)),
            held,
            self._inventory.chips,
            Findings(),
        )

    async def call_down(
        self, plan: Plan, operation_hooks: OperationHooks, reserved: Sequence[Lease], progress: Progress
    ) -> None:
        """Calls the hooks of the way down, and looks afresh at what they have left on the GPUs.

        Raises:
            OperationError: A hook failed; all of them are undone.
        """
        progress.enter("hooks")
        await progress.intend(intent_of("hooks", plan, {}, reserved))
        await operation_hooks.down()
        try:
            for target in plan.targets:
                target.members = await self.members_of(target.workload)
        except BaseException:
            await operation_hooks.back()
            raise

    async def _move(
        self,
        plan: Plan,
        state: WorkloadState.ValueType,
        reserved: Sequence[Lease],
        progress: Progress,
        lock_timeout_s: float,
        keep: Keep | None = None,
    ) -> None:
        """Parks the members, wakes them, or one after the other, and settles by where they are then."""
        with trio.CancelScope(shield=True):  # the states say already that the operation is under way
            group, outcomes = await self._group(plan, progress)
        settlement = Settlement(self._pool, plan, outcomes, reserved)
        operation_hooks = self._hook_factory.operation_hooks(
            plan.targets, None if state == RESTORING else plan.policy, progress
        )
        error: OperationError | None = None
        done = False
        kept: StoredCheckpoint | None = None

        async def intend(phase: str) -> None:
            await progress.intend(intent_of(phase, plan, outcomes, reserved))

        try:
            if state != RESTORING:
                await self._park(plan, group, outcomes, lock_timeout_s, progress, intend)
            if keep is not None:
                kept = await self._keep(plan, group, progress, keep)
            with trio.CancelScope(shield=True):
                if state == RESTORING:
                    await intend("restore")
                    _mark_restored(plan)
                    await self._wake(group, plan.pairs, progress, operation_hooks)
                elif state == REMAPPING:
                    _mark_restored(plan)
                    await self._wake_or_return(plan, group, progress, intend, operation_hooks)
            if kept is None:
                for target in plan.targets:
                    require_alive(target.workload)
            done = True
        except OperationError as raised:
            error = raised
            raise
        finally:
            with trio.CancelScope(shield=True):
                await self._settle(plan, settlement, outcomes, progress, error, kept, done=done)

    async def _keep(self, plan: Plan, group: Group, progress: Progress, keep: Keep) -> StoredCheckpoint:
        """Puts parked members on disk, or brings them back to where they were."""
        try:
            return await keep(plan, progress)
        except BaseException:
            await group.roll_back()
            raise

    async def _settle(
        self,
        plan: Plan,
        settlement: Settlement,
        outcomes: Mapping[str, Sequence[MemberOutcome]],
        progress: Progress,
        error: OperationError | None,
        kept: StoredCheckpoint | None,
        *,
        done: bool,
    ) -> None:
        members, occupancies = await where_members_are(self._verification, plan, outcomes, done=done)
        may_use_nccl = done and bool(plan.pairs) and await _may_use_nccl(plan)
        if not done:
            errors = [outcome.error for mine in outcomes.values() for outcome in mine]
            error = error or next((told for told in errors if told is not None), _CANCELLED)
        # No await from here on: the leases and states of all parties are one record on disk.
        if done:
            settlement.done(progress)
            progress.applied_pairs = plan.pairs
            if may_use_nccl:
                progress.warnings.append(STALE_BUS_ID)
        else:
            settlement.failed(occupancies, progress)
        for target in plan.targets:
            workload_id = target.workload.workload_id
            mine = outcomes[workload_id]
            if any(phase.call is DriverCall.RESTORE for outcome in mine for phase in outcome.phases):
                target.workload.restored = True
            settle_state(self._workloads, target, mine, members[workload_id], error, plan.policy, kept)
            self._workloads.limit_memory(target.workload, parked_bytes(target.workload))

    async def _group(self, plan: Plan, progress: Progress) -> tuple[Group, dict[str, list[MemberOutcome]]]:
        """The members of all parties as one group, and their outcomes by workload id."""
        lanes: list[Sequence[Member]] = []
        for target in plan.targets:
            one_by_one = await is_sequential(target.workload.spec, target.members)
            lanes += [target.members] if one_by_one else [(member,) for member in target.members]
        group = Group(self._driver, self._inventory, self._rates, lanes, progress.enter)
        left = iter(group.outcomes)
        outcomes = {
            target.workload.workload_id: list(islice(left, len(target.members))) for target in plan.targets
        }
        progress.outcomes += [
            (workload_id, outcome) for workload_id, mine in outcomes.items() for outcome in mine
        ]
        return group, outcomes

    async def _park(
        self,
        plan: Plan,
        group: Group,
        outcomes: Mapping[str, Sequence[MemberOutcome]],
        lock_timeout_s: float,
        progress: Progress,
        intend: Callable[[str], Awaitable[None]],
    ) -> None:
        usage: Usage = {}

        async def size() -> None:
            nonlocal usage
            # They may have taken memory since the plan. Now they can't.
            usage = await self._verification.usage()
            if more := _size_again(plan, outcomes, usage):
                self._host_memory.need(more, parks=plan.stays_in_memory).check()
            await intend("checkpoint")

        async def rescan() -> tuple[Member, ...]:
            _, found = await both(size, partial(self._search, plan, outcomes))
            return found.members(usage)

        await intend("lock")
        await group.suspend(lock_timeout_s, rescan)
        with trio.CancelScope(shield=True):
            progress.enter("verify")
            try:
                # Processes without CUDA run on during the checkpoint, which can take a minute.
                now, found = await both(self._verification.usage, partial(self._search, plan, outcomes))
                # NVML lists none that is checkpointed.
                group.refuse_newcomers(found.members(usage), "checkpointed")
                members = [outcome.member for outcome in group.outcomes]
                now = await self._verification.prove_freed(Before(members, found.pids, usage), now)
                _size_again(plan, outcomes, freed_usage(found.pids, usage, now))
            except BaseException:
                await group.roll_back()
                raise

    async def _search(self, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]]) -> "_Found":
        """The processes of the workloads then and now, and what the driver says of those that are no members.

        Members are not asked about: the driver has just told the state of each.

        Raises:
            OperationError: The driver can't be asked.
        """
        pids = {identity.pid for target in plan.targets for identity in target.processes}
        searches: list[Search] = []
        for target in plan.targets:
            mine = members_after(outcomes[target.workload.workload_id])
            known = {member.identity for member in mine}
            processes = (await target.workload.find_tree(known=target.tree)).processes
            pids |= {identity.pid for identity in processes}
            search = await search_members(self._driver, [each for each in processes if each not in known])
            searches.append(Search((*mine, *search.members), search.closed))
        return _Found(tuple(searches), frozenset(pids))

    async def _wake(
        self, group: Group, pairs: tuple[GpuPair, ...], progress: Progress, operation_hooks: OperationHooks
    ) -> None:
        """Restores, proves it, and calls the hooks of the way up; or brings all back to where they were."""
        await self._restore(group, pairs, progress)
        if not operation_hooks.is_needed:
            return
        progress.enter("hooks")
        try:
            await operation_hooks.up()
        except OperationError:
            await operation_hooks.down_again()
            await group.roll_back()
            raise

    async def _restore(self, group: Group, pairs: tuple[GpuPair, ...], progress: Progress) -> None:
        """Restores, and proves it. If members turn up on GPUs that nobody expected, it is tried once more."""
        before = [outcome.displacement for outcome in group.outcomes]
        try:
            await self._restore_once(group, pairs, progress)
        except OperationError as error:
            if error.reason != errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED:
                raise
            surprising = await self._find_places(group, before)
            await group.roll_back()
            if not surprising:
                raise
            await self._restore_once(group, pairs, progress)

    async def _restore_once(self, group: Group, pairs: tuple[GpuPair, ...], progress: Progress) -> None:
        await group.restore(pairs)
        progress.enter("verify")
        if are_unlisted([outcome.member for outcome in group.outcomes]):
            progress.warnings.append("NVML lists no member on a GPU: where they run is not proved")
        await self._verification.prove_placed([outcome.member for outcome in group.outcomes], pairs)

    async def _find_places(self, group: Group, before: Sequence[tuple[GpuPair, ...]]) -> bool:
        """Notes where NVML lists each member. True: one is neither where it was nor where it was sent.

        Then an earlier restore had moved it and said that it had not.
        """
        surprising = False
        for outcome, displacement in zip(group.outcomes, before, strict=True):
            actual = await self._verification.listed_gpus([outcome.member])
            if actual == placed(outcome.member, displacement):
                outcome.displacement = displacement
            elif actual != placed(outcome.member, outcome.displacement) and len(actual) == 1:
                moved = map(GpuPair, outcome.member.gpu_uuids, actual)
                outcome.displacement = complete_pairs(moved, self._inventory.chips)
                surprising = True
        return surprising

    async def _wake_or_return(
        self,
        plan: Plan,
        group: Group,
        progress: Progress,
        intend: Callable[[str], Awaitable[None]],
        operation_hooks: OperationHooks,
    ) -> None:
        """Restores on the new GPUs, or else on the old ones, or else leaves the members parked."""
        try:
            await intend("restore")
            await self._wake(group, plan.pairs, progress, operation_hooks)
        except OperationError:
            if plan.astray:
                raise  # the members were on different GPUs, and not all of those are leased
            stranded = [
                outcome.member.identity.pid for outcome in group.outcomes if outcome.state_after == RUNNING
            ]
            if stranded:
                pids = ", ".join(map(str, stranded))
                progress.warnings.append(
                    f"process {pids} can't be parked again and runs on: the others stay parked"
                )
                raise
            try:
                await self._wake(group, (), progress, operation_hooks)
            except OperationError as error:
                progress.warnings.append(f"it could not go back to its old GPUs either: {error.message}")
            else:
                progress.warnings.append(
                    "it could not be restored on the new GPUs, so it went back to the old"
                )
            raise


def intent_of(
    phase: str, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], reserved: Sequence[Lease]
) -> Intent:
    """What the next phase is about to do, with the members as they are now."""
    targets = tuple(
        WorkloadIntent(
            workload_id=target.workload.workload_id,
            members=members_after(outcomes[target.workload.workload_id]) if outcomes else target.members,
            home=target.home,
            destination=target.destination,
            parked=target.workload.parked is not None,
            full_bytes=dict(target.full_bytes),
        )
        for target in plan.targets
    )
    return Intent(phase, targets, plan.pairs, tuple(reserved), plan.policy)


def _size_again(plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], usage: Usage) -> dict[int, int]:
    """Takes in what members have on their GPUs, and returns by how much it is more, by pid of who has more.

    A member that is parked already, or that is not where its workload is, keeps what is known of it. So does
    one of which NVML tells less than before.
    """
    more: dict[int, int] = {}
    for target in plan.targets:
        mine = [o for o in outcomes[target.workload.workload_id] if o.state_before == RUNNING]
        if any(outcome.displacement for outcome in mine):
            continue
        for outcome, member in zip(
            mine, sized([each.member for each in mine], usage, target.home), strict=True
        ):
            if outcome.member.device_memory_bytes.keys() <= member.device_memory_bytes.keys():
                if (grown_bytes := member.total_bytes - outcome.member.total_bytes) > 0:
                    more[member.identity.pid] = grown_bytes
                outcome.member = member
    return more


def _mark_restored(plan: Plan) -> None:
    """From now on, killing the members while they run could hang the host."""
    for target in plan.targets:
        target.workload.restored = True


async def _may_use_nccl(plan: Plan) -> bool:
    """Whether a member has loaded NCCL, or it is not known what the members have loaded."""
    pids = [member.identity.pid for member in plan.members]

    def look() -> bool:
        return any(loaded_library(pid, NCCL) for pid in pids)

    with suppress(OperationError), trio.move_on_after(LIBRARIES_TIMEOUT_S):
        return await read_process(pids[0], look) if pids else False
    return True
