"""Checkpointable applications: stopped with a checkpoint, started again, and restored from it.

Stopping an application that is not checkpointable loses its work, and needs explicit permission.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, final

import trio
from leasehold.v1 import operation_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import WorkloadState
from msgspec import structs

from leasehold_worker.applications import checkpointing
from leasehold_worker.applications.application import Application
from leasehold_worker.applications.checkpointing import no_kernel
from leasehold_worker.applications.registry import ApplicationRegistry
from leasehold_worker.applications.timeouts import DEFAULT_TIMEOUTS, ApplicationTimeouts
from leasehold_worker.checkpoints.application_file import StoredCheckpoint
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.volume_calls import call_volume
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.allocation import Allocation
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.moves.move import intent_of
from leasehold_worker.operations.acquisition import Acquisition
from leasehold_worker.operations.exit_monitor import ExitMonitor
from leasehold_worker.operations.termination import Termination
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.planning.workload_checks import require_alive, require_state
from leasehold_worker.workloads.eviction import RETAIN, STOP
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.program_start import ProgramStart
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import (
    CHECKPOINTED,
    RESTORING,
    RUNNING,
    SLEEPING,
    STOPPED,
    SUSPENDING,
)
from leasehold_worker.workloads.workload import Parked, Workload

STOP_POLICY: Final = EvictionPolicy(weight_strategy=RETAIN, process_strategy=STOP)


@final
class StopRestart:
    """Saves and restores applications of one host, around the end and the start of their processes.

    Args:
        workloads: The registry.
        host_shares: The host resources of the workloads.
        exit_monitor: Notices the end of the workloads.
        programs: Starts programs.
        applications: The checkpointable applications.
        application_store: Their checkpoints on disk.
        disk: The disk space for them, and the checkpoints in use.
        termination: Ends processes.
        acquisition: Allocates the resources of a program.
        timeouts: Time limits of the calls to applications.
    """

    def __init__(
        self,
        workloads: Workloads,
        host_shares: HostShares,
        exit_monitor: ExitMonitor,
        programs: ProgramStart,
        applications: ApplicationRegistry,
        application_store: ApplicationStore,
        disk: CheckpointDirectory,
        termination: Termination,
        acquisition: Acquisition,
        timeouts: ApplicationTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._timeouts = timeouts
        self._workloads = workloads
        self._host_shares = host_shares
        self._exit_monitor = exit_monitor
        self._programs = programs
        self._applications = applications
        self._application_store = application_store
        self._disk = disk
        self._termination = termination
        self._acquisition = acquisition

    async def checkpoint(self, workload_id: str, progress: Progress) -> None:
        """Has the application of a running workload save itself, and continue.

        Raises:
            OperationError: WRONG_STATE; KERNEL_NOT_READY: there is none, or it refuses; or the error of the
                application.
        """
        workload = self._workloads.get(workload_id)
        require_state(workload, (RUNNING,), "checkpointed")
        kernel = self.kernel_of(workload)
        progress.enter("save")
        await self._save(kernel, progress, resume=True)
        await self._disk.clean_up_in_time(workload)

    def kernel_of(self, workload: Workload) -> Application:
        """The checkpointable application of a workload.

        Raises:
            OperationError: KERNEL_NOT_READY: there is none.
        """
        kernel = self._applications.of(workload.workload_id)
        if kernel is None:
            raise no_kernel(workload)
        return kernel

    async def suspend(self, plan: Plan, progress: Progress) -> None:
        """Has the application save itself if it can, ends the processes, and releases all resources.

        It can be cancelled until the processes are told to end.

        Raises:
            OperationError: The operation failed, and the workload is unchanged.
        """
        workload = plan.target.workload
        before = workload.state
        saved: StoredCheckpoint | None = None
        kernel = self._applications.of(workload.workload_id) if before == RUNNING else None
        if plan.saves and kernel is None:
            raise no_kernel(workload)
        self._workloads.set_state(workload, SUSPENDING)
        try:
            if kernel is not None:
                progress.enter("save")
                await progress.intend(intent_of("save", plan, {}, ()))
                saved = await self._save(kernel, progress, resume=False)
            await trio.lowlevel.checkpoint_if_cancelled()
            with trio.CancelScope(shield=True):
                kept = saved or await self._newest(workload)
                if kept is not None:
                    self._disk.expect(kept.checkpoint_id, workload)
                await progress.intend(_ending("end", plan, kept))
                if before != CHECKPOINTED:
                    require_alive(workload)  # a program that ended by itself is not restarted later
                self._exit_monitor.stop(workload)
                at_work = before in (RUNNING, SLEEPING)
                told = partial(progress.intend, _ending("ending", plan, kept))
                await self._termination.end_processes(workload, progress, parked=not at_work, told=told)
        except BaseException:
            with trio.CancelScope(shield=True):
                if kernel is not None and saved is not None:
                    progress.warnings += [warning for warning in [await kernel.undo()] if warning]
                self.keep_alive(workload, before)
            raise
        self.settle_stopped(plan.target, plan.policy, kept, progress)
        await self._disk.clean_up_in_time(workload)

    def keep_alive(self, workload: Workload, state: WorkloadState.ValueType) -> None:
        """Puts back a workload whose processes could not be ended."""
        if not workload.absent and not self._exit_monitor.watches(workload):
            self._exit_monitor.watch(workload)
        self._workloads.set_state(workload, state)

    def settle_stopped(
        self,
        target: WorkloadPlan,
        policy: EvictionPolicy | None,
        kept: StoredCheckpoint | None,
        progress: Progress,
    ) -> None:
        """Releases the resources of a workload whose processes have ended, and records its checkpoint.

        No await in here: leases and states are one record on disk.
        """
        workload = target.workload
        progress.released_gpu_uuids = workload.gpu_uuids
        self._workloads.release_lease(workload)
        self._host_shares.give_back(workload)
        workload.note_hooks(None)
        parked = Parked(
            gpu_uuids=target.home,
            device_memory_bytes={},
            policy=policy or STOP_POLICY,
            since=workload.parked.since if workload.parked else datetime.now(UTC),
            host_bytes=0,
            checkpoint_id=kept.checkpoint_id if kept else "",
            disk_bytes=kept.file_bytes if kept else 0,
        )
        self._workloads.settle(workload, STOPPED, (), parked)

    async def restore(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Starts the program of a stopped workload, and restores its application.

        No lease is reserved for that: GPUs and resources of the host are claimed here, together.

        Raises:
            OperationError: The restore failed; no process runs, and the workload is stopped as before.
        """
        workload = plan.target.workload
        run = operation_pb2.RunOperation(
            spec=workload.spec, gpu_uuids=plan.named_gpu_uuids, hold_id=plan.hold_id
        )
        allocation = await self._acquisition.for_run(
            workload.workload_id, run, progress, preferred=plan.target.home
        )
        lease = allocation.lease
        workload.hold_host(allocation.host)
        self._workloads.set_state(workload, RESTORING)
        try:
            progress.enter("start")
            await progress.intend(intent_of("start", plan, {}, [lease] if lease else []))
            self.expect(workload.workload_id, plan.checkpoint_id)
            restores = bool(plan.checkpoint_id)
            await self._programs.start_again(workload, lease, progress.warnings, restores=restores)
            if plan.checkpoint_id:
                named = plan.named_checkpoint_id or None
                await self._restore(workload, workload.workload_id, named, progress)
        except BaseException:
            with trio.CancelScope(shield=True):
                self.expect(workload.workload_id, "")
                await self._go_back(workload, allocation, progress)
            raise
        self._exit_monitor.watch(workload)
        self._workloads.wake(workload, allocation.hand_over_lease())
        progress.claimed_gpu_uuids = workload.gpu_uuids

    async def _go_back(self, workload: Workload, allocation: Allocation, progress: Progress) -> None:
        """Ends the restarted processes of a workload. It is stopped again, or keeps its resources."""
        try:
            await self._termination.end_processes(workload, progress, parked=True)
        except OperationError as error:
            progress.warnings.append(f"and the started program could not be ended: {error.message}")
            workload.hold(allocation.hand_over_lease())
            self._exit_monitor.watch(workload)
            self._workloads.lose(workload, error)
            return
        workload.hold_host(None)
        self._host_shares.give_back(workload)  # also removes the control group
        allocation.release()
        self._workloads.set_state(workload, STOPPED)

    def expect(self, workload_id: str, checkpoint_id: str) -> None:
        """Tells the application of a new program to wait for a restore, or not to."""
        if checkpoint_id:
            self._applications.expect_restore(workload_id)
        else:
            self._applications.forget_restore(workload_id)

    async def find(self, checkpoint_id: str) -> StoredCheckpoint | None:
        """A checkpoint with an intact header. None: there is none."""
        try:
            return await trio.to_thread.run_sync(self._application_store.find, checkpoint_id)
        except OperationError:
            return None

    async def require_checkpoint(self, checkpoint_id: str) -> None:
        """Refuses a missing or damaged checkpoint.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, or CHECKPOINT_CORRUPT.
        """
        await call_volume(self._application_store.find, checkpoint_id)

    async def begin_with(self, workload: Workload, checkpoint_id: str, progress: Progress) -> None:
        """Restores the application of a workload that was just started.

        Raises:
            OperationError: The restore failed; the workload is ended.
        """
        try:
            await self._restore(workload, "", checkpoint_id, progress)
        except BaseException:
            with trio.CancelScope(shield=True):
                self.expect(workload.workload_id, "")
                stop = operation_pb2.StopOperation()
                await self._termination.stop(workload.workload_id, stop, Progress.unheard())
            raise

    async def _restore(
        self, workload: Workload, from_workload_id: str, checkpoint_id: str | None, progress: Progress
    ) -> None:
        """Restores the application of a program that was just started, once it is registered."""
        progress.enter("load")
        kernel = await self._applications.wait_served(workload.workload_id, self._timeouts.start_s)
        restored = await checkpointing.restore(
            kernel,
            self._application_store,
            workload_id=from_workload_id,
            checkpoint_id=checkpoint_id,
            timeouts=self._timeouts,
            progress=progress.tell_bytes,
        )
        self._applications.forget_restore(workload.workload_id)
        _tell(restored, progress)

    async def _save(self, kernel: Application, progress: Progress, *, resume: bool) -> StoredCheckpoint:
        available_bytes = await call_volume(self._disk.available_bytes)
        with self._disk.room() as room:
            saved = await checkpointing.save(
                kernel,
                self._application_store,
                available_bytes=available_bytes,
                room=room,
                resume=resume,
                timeouts=self._timeouts,
                progress=progress.tell_bytes,
            )
        _tell(saved, progress)
        return saved.checkpoint

    async def _newest(self, workload: Workload) -> StoredCheckpoint | None:
        """The newest checkpoint of a workload with an intact header. None: there is none."""
        found = await call_volume(self._application_store.scan, workload.workload_id)
        return next((each for each in found if isinstance(each, StoredCheckpoint)), None)


def _tell(done: checkpointing.Transfer, progress: Progress) -> None:
    progress.warnings += done.warnings
    progress.checkpoint_id = done.checkpoint.checkpoint_id
    progress.disk_bytes = done.checkpoint.file_bytes


def _ending(phase: str, plan: Plan, kept: StoredCheckpoint | None) -> Intent:
    intent = intent_of(phase, plan, {}, ())
    if kept is None:
        return intent
    return structs.replace(intent, checkpoint_id=kept.checkpoint_id, disk_bytes=kept.file_bytes)
