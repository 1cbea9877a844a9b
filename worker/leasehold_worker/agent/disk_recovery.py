"""Recovery of workloads that a crash of the worker left between their processes and the disk.

A checkpoint is complete or absent, and processes live or don't. Both together show whether an operation is
settled forward or back.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.agent.member_recovery import MemberRecovery
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.criu.rpc import forbid_writing
from leasehold_worker.driver.members import CHECKPOINTED as MEMBER_CHECKPOINTED
from leasehold_worker.driver.members import MemberOutcome, members_after
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import is_alive, tracer, wait_ended
from leasehold_worker.moves.move import target_of
from leasehold_worker.moves.settlement import Settlement, StoredCheckpoint
from leasehold_worker.operations.termination import DEFAULT_GRACE_S
from leasehold_worker.planning.driver_checks import blocked_among
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.programs.programs import abandon, launched
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import (
    CHECKPOINTED,
    FAILED,
    PARKED_BY,
    RESTORING,
    RUNNING,
    STOPPED,
    SUSPENDED,
    SUSPENDING,
)
from leasehold_worker.workloads.workload import Parked, Workload, home_of

logger = logging.getLogger(__name__)


FREED_TIMEOUT_S: Final = 60.0
"""Time for CRIU to release processes once it notices that the worker is gone."""

POLL_INTERVAL_S: Final = 0.05


@final
class DiskRecovery:
    """Settles interrupted operations on images and application checkpoints."""

    def __init__(self, parts: Parts, interrupted: MemberRecovery) -> None:
        self._parts = parts
        self._interrupted = interrupted

    async def settle(self, intent: Intent, workloads: Workloads) -> tuple[OperationError | None, str]:
        """Settles such an operation.

        Args:
            intent: The last intent of the operation.
            workloads: The registry.

        Returns:
            The error of the command, or None, and a warning.
        """
        (target,) = intent.targets
        if target.workload_id not in workloads:
            return _interrupted("and its workload is no longer known"), ""
        workload = workloads.get(target.workload_id)
        try:
            match intent.phase:
                case "save":
                    await self._interrupted.look_at(workload)
                    return _interrupted(f"workload {workload.name} keeps running"), ""
                case "end" | "ending":
                    return await self._finish_ending(workload, intent)
                case "start" | "resume":
                    return await self._undo_start(workload, intent)
                case _:
                    return await self._settle_image(workload, intent)
        finally:
            # Used reservations have become leases, which this does not release.
            for lease in intent.reserved:
                self._parts.pool.release(lease)

    async def _finish_ending(self, workload: Workload, intent: Intent) -> tuple[OperationError | None, str]:
        """Settles a workload whose processes were being ended. If they end, the workload is stopped.

        A saved application continues once it loses the worker. If SIGTERM was perhaps not sent and the
        application does not end by itself, it keeps running, since a kill would lose its newest work.
        """
        parts, (target,) = self._parts, intent.targets
        parts.workloads.set_state(workload, SUSPENDING)  # another recovery may have settled the state before
        before = _state_before(workload) if target.parked else RUNNING
        told = intent.phase == "ending"
        if told or not target.parked or workload.is_asleep:
            with trio.move_on_after(DEFAULT_GRACE_S):
                await wait_ended(workload.root)
            if not told and is_alive(workload.root):
                self._go_on(workload, before)
                return _interrupted(f"workload {workload.name} keeps running"), ""
        try:
            await parts.termination.end_processes(workload, Progress.unheard(), parked=True)
        except OperationError as error:
            self._go_on(workload, before)
            return error, ""
        saved = await parts.stop_restart.find(intent.checkpoint_id)
        ended = WorkloadPlan(workload, home=target.home)
        parts.stop_restart.settle_stopped(ended, intent.policy, saved, Progress.unheard())
        await parts.disk.clean_up_in_time(workload)
        return None, "the worker restarted during the command and then ended the processes"

    def _go_on(self, workload: Workload, state: WorkloadState.ValueType) -> None:
        """Puts a workload with living processes back to its state, and monitors it again."""
        self._parts.exit_monitor.watch(workload)
        self._parts.workloads.set_state(workload, state)

    async def _undo_start(self, workload: Workload, intent: Intent) -> tuple[OperationError | None, str]:
        """Ends the processes of an interrupted restart or restore. The workload is suspended as before."""
        workloads = self._parts.workloads
        workloads.set_state(workload, RESTORING)  # another recovery may have settled the state before
        try:
            await self._end_started(workload)
        except OperationError as error:
            gpu_uuids = [gpu_uuid for lease in intent.reserved for gpu_uuid in lease.gpu_uuids]
            granted = self._parts.pool.reassign(intent.reserved, [(workload.workload_id, gpu_uuids)])
            workload.hold(granted.get(workload.workload_id))
            if not workload.absent:
                self._parts.exit_monitor.watch(workload)
            workloads.lose(workload, error)
            return error, ""
        workloads.release_lease(workload)  # held if the operation itself had failed to end the processes
        self._parts.host_shares.give_back(workload)
        self._parts.applications.forget_restore(workload.workload_id)
        workloads.set_state(workload, STOPPED if intent.phase == "start" else CHECKPOINTED)
        return _interrupted(f"workload {workload.name} is suspended as before"), ""

    async def _end_started(self, workload: Workload) -> None:
        """Ends the program of an interrupted restart or restore, or makes sure that it never starts.

        Raises:
            OperationError: STORAGE_UNAVAILABLE, the record of the program can't be read or written, or as of
                :meth:`Termination.end_processes`. The program may run.
        """
        folder = self._parts.workloads.folder(workload.workload_id)
        try:
            is_abandoned = await trio.to_thread.run_sync(abandon, folder)
            who = None if is_abandoned else await trio.to_thread.run_sync(launched, folder)
        except OSError as error:
            raise OperationError(
                errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
                f"the worker restarted during the command, and can't read whether workload {workload.name} "
                f"runs ({error.strerror}): check the disk of {folder}, end the program if it runs, and "
                "restart the worker",
            ) from error
        if who is not None and is_alive(who.program):
            self._parts.workloads.begin_again(workload, who.program)
        await self._parts.termination.end_processes(workload, Progress.unheard(), parked=True)

    async def settle_wake(self, intent: Intent, workload: Workload) -> tuple[OperationError | None, str]:
        """Settles a restore from an image: the workload runs, or is suspended as before.

        No task monitors its processes, so their end does not end the workload.
        """
        parked = workload.parked
        if parked is None:
            raise ValueError("a restore needs the record of the suspend")
        error: OperationError | None = _interrupted(f"the processes of workload {workload.name} have ended")
        warning = ""
        alive = not workload.absent and is_alive(workload.root)
        if not workload.absent:
            workload.mark_restored()  # members can outlive the first process, and may run
        if alive:
            error, warning = await self._interrupted.settle(intent, [workload], "restore")
        else:
            for lease in intent.reserved:
                self._parts.pool.release(lease)
        if workload.state == RUNNING:
            await self._parts.disk.clean_up_in_time(workload)
        elif workload.state == SUSPENDED or not alive:
            error = await self._put_back(workload, parked) or error
        if workload.state == RESTORING:
            self._end(workload)
        elif not workload.absent:
            self._parts.exit_monitor.watch(workload)
        return await self.call_hooks([workload], "restore") or error, warning

    def _end(self, workload: Workload) -> None:
        """Ends a workload whose processes have ended and that has no checkpoint."""
        if workload.absent:
            why = (
                f"the host restarted while workload {workload.name} was suspended or being "
                "restored: run it again"
            )
            rebooted = OperationError(errors_pb2.ERROR_REASON_HOST_REBOOTED, why)
            self._parts.exit_monitor.end(workload, FAILED, rebooted)
            return
        workload.mark_restored()  # members can outlive the first process, and may run
        # Otherwise the exit monitor would wait for the end of an operation.
        self._go_on(workload, RUNNING)

    async def _put_back(self, workload: Workload, parked: Parked) -> OperationError | None:
        """Ends the restored processes of a workload from an image, which is suspended again.

        Args:
            workload: The workload.
            parked: Record of its suspend.

        Returns:
            The error of the command. None: the image is gone.
        """
        if await self._parts.image_checkpoint.find_kept(parked.checkpoint_id) is None:
            return None  # there is no image, so the processes must be kept
        progress = Progress.unheard()
        await self._parts.image_checkpoint.put_back(workload, parked, workload.members, progress)
        return _interrupted(f"workload {workload.name} is suspended as before")

    async def _settle_image(self, workload: Workload, intent: Intent) -> tuple[OperationError | None, str]:
        """Settles a dump: the image is complete and the processes are gone, or they continue."""
        image_checkpoint = self._parts.image_checkpoint
        if not await _is_free(workload):
            held = _interrupted(
                f"CRIU still holds the processes of workload {workload.name}: restore it later"
            )
            self._parts.exit_monitor.watch(workload)
            self._parts.workloads.lose(workload, held)
            return held, ""
        kept = await image_checkpoint.find_kept(intent.checkpoint_id)
        if kept is not None and (workload.absent or not is_alive(workload.root)):
            self._settle_kept(workload, intent, kept)
            return None, "the worker restarted during the command and found it complete"
        if workload.absent or not is_alive(workload.root):
            self._end(workload)
            return _interrupted(f"the processes of workload {workload.name} have ended"), ""
        self._parts.exit_monitor.watch(workload)
        if kept is not None:
            await image_checkpoint.forget(kept.checkpoint_id)
        error, warning = await self._interrupted.settle(intent, [workload], "suspend")
        return await self.call_hooks([workload], "suspend") or error, warning

    def _settle_kept(self, workload: Workload, intent: Intent, kept: StoredCheckpoint) -> None:
        """Records that a workload has become an image. No await in here."""
        (found,) = intent.targets
        self._parts.host_shares.give_back(workload)
        outcomes = [MemberOutcome(each, each.state, MEMBER_CHECKPOINTED) for each in found.members]
        id_, plan = workload.workload_id, Plan([target_of(workload, found)], policy=intent.policy)
        settlement = Settlement(self._parts.workloads, self._parts.pool, plan, {id_: outcomes}, ())
        settlement.settle({id_: members_after(outcomes)}, {}, None, Progress.unheard(), kept=kept)

    async def call_hooks(self, workloads: Sequence[Workload], kind: str) -> OperationError | None:
        """Calls the hooks of workloads that run again: those after a restore, or a rollback.

        Returns:
            The error of a workload whose restore is incomplete. The restore may be repeated.
        """
        failed: OperationError | None = None
        for workload in workloads:
            if workload.state != RUNNING or workload.hooked is None:
                continue
            progress = Progress.unheard()
            target = WorkloadPlan(workload, members=workload.members, home=home_of(workload))
            operation_hooks = self._parts.hook_factory.operation_hooks([target], None, progress)
            try:
                await (operation_hooks.up() if kind == "restore" else operation_hooks.back())
            except OperationError as error:
                failed = error
            for warning in progress.warnings:
                logger.warning("workload %s: %s", workload.name, warning)
            self._parts.workloads.report(workload)
        return failed


def _state_before(workload: Workload) -> WorkloadState.ValueType:
    """The state of a suspended workload, by its strategy."""
    strategy = workload.parked.policy.process_strategy if workload.parked else None
    states = [state for state, by in PARKED_BY.items() if by == strategy]
    return states[0] if states else RUNNING


async def _is_free(workload: Workload) -> bool:
    """Waits until no process stops or traces the processes any more, as CRIU does.

    A CRIU without its worker notices that at its next message, perhaps many gigabytes later. So its writes
    are made to fail, and it rolls back.
    """
    with trio.move_on_after(FREED_TIMEOUT_S), suppress(OperationError):
        while blocked := await blocked_among(await workload.find_processes()):
            for pid, name in filter(None, (tracer(identity) for identity, _ in blocked)):
                if name == "criu":
                    forbid_writing(pid)
            await trio.sleep(POLL_INTERVAL_S)
        return True
    return False


def _interrupted(what: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_INTERRUPTED, f"the worker restarted during the command: {what}; send it again"
    )
