"""Workloads that sleep: their framework has put the weights away, and their processes run on.

They give their lease up, and keep a CUDA context on their GPUs, of half a gibibyte or so. So they can only
wake where they were.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, final

import trio
from leasehold.v1 import workload_pb2

from leasehold_worker.beside import HookCalls
from leasehold_worker.checkpoint.members import bytes_by_gpu
from leasehold_worker.errors import OperationError
from leasehold_worker.leases import Lease
from leasehold_worker.moving import Moving, intent_of
from leasehold_worker.plan import Party, Plan
from leasehold_worker.pool import GpuPool
from leasehold_worker.preconditions import require_alive
from leasehold_worker.report import Report
from leasehold_worker.strategies import OFFLOAD
from leasehold_worker.workload import RUNNING, SLEEPING, Parked, Workload
from leasehold_worker.workloads import Workloads

SUSPENDING: Final = workload_pb2.WORKLOAD_STATE_SUSPENDING
RESTORING: Final = workload_pb2.WORKLOAD_STATE_RESTORING


@final
class Sleeping:
    """Puts workloads to sleep, and wakes them, by nothing but their hooks."""

    def __init__(self, pool: GpuPool, workloads: Workloads, hook_calls: HookCalls, moving: Moving) -> None:
        self._pool = pool
        self._workloads = workloads
        self._hook_calls = hook_calls
        self._moving = moving

    async def put_to_sleep(self, plan: Plan, report: Report) -> None:
        """Calls the hooks of the way down, and gives the lease up.

        Raises:
            OperationError: A hook failed; all of them are undone, and the workload runs.
        """
        party, policy = plan.party, plan.policy
        workload = party.workload
        if policy is None:
            raise ValueError("a workload is put to sleep by a policy")
        full = bytes_by_gpu(party.members)
        self._workloads.set_state(workload, SUSPENDING)
        try:
            beside = self._hook_calls.beside(plan.parties, policy, report)
            await self._moving.call_down(plan, beside, [], report)
            require_alive(workload)
        except BaseException:
            self._workloads.set_state(workload, RUNNING)
            raise
        left = bytes_by_gpu(party.members)
        freed = {gpu_uuid: max(0, size - left.get(gpu_uuid, 0)) for gpu_uuid, size in full.items()}
        # No await from here on: the lease and the state are one record on disk.
        if workload.lease is not None:
            self._pool.release(workload.lease)
            workload.lease = None
        report.released_gpu_uuids = party.home
        workload.members = party.members
        workload.parked = Parked(
            gpu_uuids=party.home,
            device_memory_bytes=freed,
            policy=policy,
            since=datetime.now(UTC),
            host_bytes=sum(freed.values()) if policy.weight_strategy == OFFLOAD else 0,
        )
        self._workloads.set_state(workload, SLEEPING)

    async def wake(self, plan: Plan, reserved: Sequence[Lease], report: Report) -> None:
        """Takes back its GPUs, which were reserved, and calls the hooks of the way up.

        Raises:
            OperationError: A hook failed. The workload sleeps again; or where it can't be brought to that, it
                runs and holds its GPUs, since it takes them.
        """
        workload = plan.party.workload
        beside = self._hook_calls.beside(plan.parties, None, report)
        self._workloads.set_state(workload, RESTORING)
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            await report.intend(intent_of("hooks", plan, {}, reserved))
            report.enter("hooks")
            with trio.CancelScope(shield=True):
                try:
                    await beside.up()
                except OperationError:
                    if not await beside.down_again():
                        self._take_over(plan, reserved, report)
                    raise
            self._take_over(plan, reserved, report)
        except BaseException:
            if workload.state == RESTORING:
                self._workloads.set_state(workload, SLEEPING)
            raise
        finally:
            self._moving.release(reserved)

    async def call_up(self, workload: Workload, report: Report) -> None:
        """Calls the hooks of the way up for a workload that runs, since not all of them were undone.

        Raises:
            OperationError: HOOK_FAILED; what is left is tried again the next time.
        """
        report.enter("hooks")
        with trio.CancelScope(shield=True):
            members = await self._moving.members_of(workload)
            beside = self._hook_calls.beside([Party(workload, members=members)], None, report)
            try:
                await beside.up()
            finally:
                self._workloads.set_state(workload, workload.state)

    def _take_over(self, plan: Plan, reserved: Sequence[Lease], report: Report) -> None:
        """Gives a workload the GPUs on which it is awake. No await in here: one record on disk.

        Raises:
            OperationError: TARGET_CRASHED: it ended meanwhile.
        """
        workload = plan.party.workload
        require_alive(workload)
        granted = self._pool.reassign(reserved, [(workload.workload_id, plan.party.destination)])
        workload.lease = granted.get(workload.workload_id)
        workload.parked = None
        workload.yielded = False
        report.claimed_gpu_uuids = plan.party.destination
        self._workloads.set_state(workload, RUNNING)
