"""Suspend, restore and remap by the CUDA driver, with the hooks and the leases of the workloads.

Destination GPUs are reserved before any are released. A lease moves only after NVML has shown where the
members are. A cancellation rolls a move back. Past the point of no return the move is finished: that is the
first call that moves device memory back, or the complete image.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import CHECKPOINTED, Member, find_members
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.driver.verification import Verification, sized
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.shared_libraries import loaded_library
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.leasing.suspend_memory import SuspendMemory
from leasehold_worker.moves.member_restore import MemberRestore
from leasehold_worker.moves.member_suspend import MemberSuspend
from leasehold_worker.moves.move import Move, intent_of
from leasehold_worker.moves.settlement import Settlement, where_members_are
from leasehold_worker.moves.workload_hooks import HookFactory, OperationHooks
from leasehold_worker.planning.displacement import find_displaced
from leasehold_worker.planning.findings import Findings
from leasehold_worker.planning.plan import Plan
from leasehold_worker.planning.workload_checks import is_sequential, require_alive
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import REMAPPING, RESTORING, SUSPENDING
from leasehold_worker.workloads.workload import Workload, home_of

STALE_BUS_ID: Final = (
    "a process of the workload has loaded NCCL, and the driver may report the PCI bus id of "
    "the old GPU: if communicators created after this move fail, run the workload again"
)
"""NVIDIA/cuda-checkpoint issue 48."""

NCCL: Final = "libnccl.so"
LIBRARIES_TIMEOUT_S: Final = 2.0
"""Time for reading the libraries of the members. Members that can't be read in time may use NCCL."""

_CANCELLED: Final = OperationError(errors_pb2.ERROR_REASON_CANCELLED, "cancelled, and rolled back")


@final
class CudaSuspend:
    """Moves the members of one host's workloads off their GPUs and back."""

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        pool: GpuPool,
        workloads: Workloads,
        host_shares: HostShares,
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
        self._host_shares = host_shares
        self._hook_factory = hook_factory
        self._rates = rates
        self._host_memory = host_memory
        self._verification = verification
        self._member_suspend = MemberSuspend(driver, verification, host_memory)
        self._member_restore = MemberRestore(inventory, verification)

    async def suspend(self, plan: Plan, progress: Progress) -> None:
        """Suspends the members of a workload. After a failure, the suspend is rolled back.

        Raises:
            OperationError: The suspend failed and was rolled back, unless the progress reports otherwise.
        """
        async with self.suspended(plan, progress):
            pass

    @asynccontextmanager
    async def suspended(self, plan: Plan, progress: Progress) -> AsyncIterator[Move]:
        """Suspends the members of a workload, and records the outcome at the end of the context.

        The context may put the suspended processes on disk and set :attr:`Move.kept`. An exception in the
        context rolls the suspend back.

        Raises:
            OperationError: The suspend failed and was rolled back, unless the progress reports otherwise.
        """
        async with self._down(plan, SUSPENDING, [], progress) as move, self._settled(move):
            await self._member_suspend.suspend(move)
            try:
                yield move
            except BaseException:
                await move.group.roll_back()
                raise

    async def restore(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Restores the members of a workload on reserved GPUs, or rolls that back.

        Members on GPUs that they must leave are suspended first, as in a remap.

        Raises:
            OperationError: The suspend failed and was rolled back, unless the progress reports otherwise.
        """
        if plan.astray:
            await self.remap(plan, reserved, progress)
            return
        before = [(target.workload, target.workload.state) for target in plan.targets]
        hooks = self._hook_factory.operation_hooks(plan.targets, None, progress)
        self._set_states(plan, RESTORING)
        try:
            move = await self._begin(plan, RESTORING, reserved, hooks, progress)
        except BaseException:
            for workload, former in before:
                self._workloads.set_state(workload, former)
            raise
        async with self._settled(move):
            with trio.CancelScope(shield=True):
                await move.intend("restore")
                _mark_restored(plan)
                await self._member_restore.restore(move, plan.pairs)

    async def remap(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Suspends members, and restores them on other GPUs, or else on the old ones.

        Raises:
            OperationError: The members are not on the new GPUs; the progress names their GPUs.
        """
        async with self._down(plan, REMAPPING, reserved, progress) as move, self._settled(move):
            await self._member_suspend.suspend(move)
            with trio.CancelScope(shield=True):
                _mark_restored(plan)
                await self._member_restore.restore_or_return(move)

    async def members_of(self, workload: Workload) -> tuple[Member, ...]:
        """The current members of a workload, with their sizes."""
        found = await find_members(self._driver, await workload.find_processes())
        usage = await self._verification.usage()
        # Members on GPUs without a lease return to leased GPUs later; the plan has a warning.
        return await find_displaced(
            sized(found, usage, home_of(workload)),
            workload.gpu_uuids,
            self._inventory.chips,
            Findings(),
        )

    async def call_down(
        self, plan: Plan, hooks: OperationHooks, reserved: Sequence[Lease], progress: Progress
    ) -> None:
        """Calls the hooks before a suspend, and measures the remaining device memory of the members.

        Raises:
            OperationError: A hook failed; all hooks are rolled back.
        """
        progress.enter("hooks")
        await progress.intend(intent_of("hooks", plan, {}, reserved))
        await hooks.down()
        try:
            for target in plan.targets:
                target.members = await self.members_of(target.workload)
        except BaseException:
            await hooks.back()
            raise

    def _set_states(self, plan: Plan, state: WorkloadState.ValueType) -> None:
        for target in plan.targets:
            self._workloads.set_state(target.workload, state)

    @asynccontextmanager
    async def _down(
        self, plan: Plan, state: WorkloadState.ValueType, reserved: Sequence[Lease], progress: Progress
    ) -> AsyncIterator[Move]:
        """Calls the hooks, and begins a move of the remaining memory. An exception inside undoes both."""
        before = [(target.workload, target.workload.state) for target in plan.targets]
        hooks = self._hook_factory.operation_hooks(plan.targets, plan.policy, progress)
        self._set_states(plan, state)
        called = False
        try:
            # Before the hooks: they may move weights to host memory, too.
            for target in plan.targets:
                moved_bytes = sum(m.total_bytes for m in target.members if m.state != CHECKPOINTED)
                self._host_shares.limit_memory(target.workload, moved_bytes)
            if hooks.is_needed and not plan.is_parked:
                await self.call_down(plan, hooks, reserved, progress)
                called = True
            plan.require_sizes()
            with self._host_memory.charged(plan.bytes_by_pid, parks=plan.stays_in_memory):
                yield await self._begin(plan, state, reserved, hooks, progress)
        except BaseException:
            with trio.CancelScope(shield=True):
                if called and any(not target.workload.parked for target in plan.targets):
                    await hooks.back()
                for workload, former in before:
                    if workload.state == state:
                        self._host_shares.limit_memory(workload)
                        self._workloads.set_state(workload, former)
            raise

    async def _begin(
        self,
        plan: Plan,
        state: WorkloadState.ValueType,
        reserved: Sequence[Lease],
        hooks: OperationHooks,
        progress: Progress,
    ) -> Move:
        """Begins a move of all members of the plan's workloads as one group."""
        lanes: list[Sequence[Member]] = []
        with trio.CancelScope(shield=True):  # shielded, since the states already show the operation
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
        return Move(plan, state, reserved, hooks, progress, group, outcomes)

    @asynccontextmanager
    async def _settled(self, move: Move) -> AsyncIterator[None]:
        """At the end of the context, gives the workloads the leases and states that fit their members."""
        error: OperationError | None = None
        done = False
        try:
            yield
            if move.kept is None:
                for target in move.plan.targets:
                    require_alive(target.workload)
            done = True
        except OperationError as raised:
            error = raised
            raise
        finally:
            with trio.CancelScope(shield=True):
                await self._settle(move, error, done=done)

    async def _settle(self, move: Move, error: OperationError | None, *, done: bool) -> None:
        plan, outcomes, progress = move.plan, move.outcomes, move.progress
        members, occupancies = await where_members_are(self._verification, plan, outcomes, done=done)
        may_use_nccl = done and bool(plan.pairs) and await _may_use_nccl(plan)
        if not done:
            errors = [outcome.error for mine in outcomes.values() for outcome in mine]
            error = error or next((told for told in errors if told is not None), _CANCELLED)
        # No await from here on: the leases and states of all workloads are one record on disk.
        if done:
            progress.applied_pairs = plan.pairs
            if may_use_nccl:
                progress.warnings.append(STALE_BUS_ID)
        for target in plan.targets:
            phases = (each for outcome in outcomes[target.workload.workload_id] for each in outcome.phases)
            if any(phase.call is DriverCall.RESTORE for phase in phases):
                target.workload.mark_restored()
            if move.kept is not None:
                self._host_shares.give_back(target.workload)
        settlement = Settlement(self._workloads, self._pool, plan, outcomes, move.reserved)
        settlement.settle(members, occupancies, error, progress, kept=move.kept)
        for target in plan.targets:
            self._host_shares.limit_memory(target.workload)


def _mark_restored(plan: Plan) -> None:
    """Marks workloads as restored: killing their running members could hang the host from now on."""
    for target in plan.targets:
        target.workload.mark_restored()


async def _may_use_nccl(plan: Plan) -> bool:
    """Whether a member has loaded NCCL, or the libraries of the members are unknown."""
    pids = [member.identity.pid for member in plan.members]

    def look() -> bool:
        return any(loaded_library(pid, NCCL) for pid in pids)

    with suppress(OperationError, OSError, RuntimeError), trio.move_on_after(LIBRARIES_TIMEOUT_S):
        return await read_process(pids[0], look) if pids else False
    return True
