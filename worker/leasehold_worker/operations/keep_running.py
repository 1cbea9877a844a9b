"""Workloads that sleep: their framework has moved the weights away, and their processes keep running.

A sleeping workload releases its lease but keeps a CUDA context of about half a gibibyte on its GPUs. So it
can only be restored on these. The memory that it keeps is not offered to other workloads.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.members import bytes_by_gpu
from leasehold_worker.driver.verification import Verification
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.leases import Lease, SlotLease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.leasing.suspend_memory import SuspendMemory
from leasehold_worker.moves.move import intent_of
from leasehold_worker.moves.workload_hooks import HookFactory, OperationHooks
from leasehold_worker.operations.cuda_suspend import CudaSuspend
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.planning.workload_checks import require_alive
from leasehold_worker.workloads.eviction import OFFLOAD, RETAIN
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import RESTORING, RUNNING, SLEEPING, SUSPENDING
from leasehold_worker.workloads.workload import Parked, Workload, home_of

MOST_KEPT: Final = 0.5
"""Share of a GPU's memory that a sleeping workload may keep. With more, the GPU is of little use to others.
"""


@final
class KeepRunning:
    """Suspends and restores workloads by their hooks alone."""

    def __init__(
        self,
        pool: GpuPool,
        workloads: Workloads,
        host_shares: HostShares,
        hook_factory: HookFactory,
        cuda_suspend: CudaSuspend,
        *,
        verification: Verification,
        host_memory: SuspendMemory,
    ) -> None:
        self._pool = pool
        self._workloads = workloads
        self._host_shares = host_shares
        self._hook_factory = hook_factory
        self._cuda_suspend = cuda_suspend
        self._verification = verification
        self._host_memory = host_memory

    async def suspend(self, plan: Plan, progress: Progress) -> None:
        """Calls the hooks before a suspend, and releases the lease.

        Raises:
            OperationError: A hook failed, or MEMORY_NOT_FREED; all hooks are rolled back, and the workload
                runs.
        """
        target, policy = plan.target, plan.policy
        workload = target.workload
        if policy is None:
            raise ValueError("a workload is put to sleep by a policy")
        full = bytes_by_gpu(target.members)
        self._workloads.set_state(workload, SUSPENDING)
        try:
            operation_hooks = self._hook_factory.operation_hooks(plan.targets, policy, progress)
            # Upper bound: only the framework knows how much it drops instead of offloading.
            offloaded = plan.bytes_by_pid if policy.weight_strategy == OFFLOAD else {}
            with self._host_memory.charged(offloaded):
                self._host_shares.limit_memory(workload, sum(offloaded.values()))
                await self._cuda_suspend.call_down(plan, operation_hooks, [], progress)
            kept = await self._kept_bytes(target, policy, operation_hooks)
            require_alive(workload)
        except BaseException:
            self._workloads.set_state(workload, RUNNING)
            self._host_shares.limit_memory(workload)
            raise
        left = bytes_by_gpu(target.members)
        freed = {gpu_uuid: max(0, size - left.get(gpu_uuid, 0)) for gpu_uuid, size in full.items()}
        # No await from here on: the lease and the state are one record on disk.
        self._pool.slots.add_asleep(kept)
        self._workloads.release_lease(workload)
        progress.released_gpu_uuids = target.home
        parked = Parked(
            gpu_uuids=target.home,
            device_memory_bytes=freed,
            policy=policy,
            since=datetime.now(UTC),
            host_bytes=sum(freed.values()) if policy.weight_strategy == OFFLOAD else 0,
        )
        self._workloads.settle(workload, SLEEPING, target.members, parked)
        self._host_shares.limit_memory(workload)

    async def _kept_bytes(
        self, target: WorkloadPlan, policy: EvictionPolicy, operation_hooks: OperationHooks
    ) -> dict[str, int | None]:
        """The memory that the workload keeps on its GPUs, by GPU.

        Raises:
            OperationError: MEMORY_NOT_FREED: the kept memory is above the limit. The hooks are rolled back.
        """
        try:
            kept = await self._verification.kept_bytes(target.members, target.home)
            if policy.weight_strategy != RETAIN:
                for gpu_uuid, kept_bytes in kept.items():
                    _require_room(target.workload, self._pool.slots.get(gpu_uuid), kept_bytes)
        except BaseException:
            with trio.CancelScope(shield=True):
                await operation_hooks.back()
            raise
        return kept

    async def restore(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Takes its reserved GPUs, and calls the hooks after a restore.

        Raises:
            OperationError: A hook failed. The workload sleeps again; if that fails too, it runs and holds its
                GPUs.
        """
        workload = plan.target.workload
        operation_hooks = self._hook_factory.operation_hooks(plan.targets, None, progress)
        self._workloads.set_state(workload, RESTORING)
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            await progress.intend(intent_of("hooks", plan, {}, reserved))
            progress.enter("hooks")
            with trio.CancelScope(shield=True):
                try:
                    await operation_hooks.up()
                except OperationError:
                    if not await operation_hooks.down_again():
                        self._take_over(plan, reserved, progress)
                    raise
            self._take_over(plan, reserved, progress)
        except BaseException:
            if workload.state == RESTORING:
                self._workloads.set_state(workload, SLEEPING)
            raise

    async def call_up(self, workload: Workload, progress: Progress) -> None:
        """Calls the remaining hooks after a restore, for a workload that runs.

        Raises:
            OperationError: HOOK_FAILED; the remaining hooks are called again the next time.
        """
        progress.enter("hooks")
        with trio.CancelScope(shield=True):
            members = await self._cuda_suspend.members_of(workload)
            operation_hooks = self._hook_factory.operation_hooks(
                [WorkloadPlan(workload, members=members, home=home_of(workload))], None, progress
            )
            try:
                await operation_hooks.up()
            finally:
                self._workloads.report(workload)

    def _take_over(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Gives a workload the lease of the GPUs that it uses. No await in here: one record on disk.

        Raises:
            OperationError: TARGET_CRASHED: it ended meanwhile.
        """
        workload = plan.target.workload
        require_alive(workload)
        granted = self._pool.reassign(reserved, [(workload.workload_id, plan.target.destination)])
        progress.claimed_gpu_uuids = plan.target.destination
        self._workloads.wake(workload, granted.get(workload.workload_id))
        self._host_shares.limit_memory(workload)


def _require_room(workload: Workload, slot: SlotLease, kept_bytes: int | None) -> None:
    if kept_bytes is None:
        raise OperationError(
            errors_pb2.ERROR_REASON_MEMORY_NOT_FREED,
            f"NVML reports no memory of workload {workload.name} on {slot.gpu_uuid}: suspend "
            "it by cuda_suspend",
            {"gpu_uuid": slot.gpu_uuid},
        )
    if slot.memory_bytes is not None and kept_bytes > slot.memory_bytes * MOST_KEPT:
        raise OperationError(
            errors_pb2.ERROR_REASON_MEMORY_NOT_FREED,
            f"workload {workload.name} keeps {size_text(kept_bytes)} of the "
            f"{size_text(slot.memory_bytes)} of {slot.gpu_uuid}, and the limit is "
            f"{MOST_KEPT:.0%}: have its framework free more, or suspend it by cuda_suspend",
            {"gpu_uuid": slot.gpu_uuid, "bytes_after": str(kept_bytes)},
        )
