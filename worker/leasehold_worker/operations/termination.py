"""The end of a workload on request."""

import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, operation_pb2, workload_pb2

from leasehold_worker.commands.intents import Intent, WorkloadIntent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import catches, send_signal, wait_ended
from leasehold_worker.operations.exit_monitor import ExitMonitor
from leasehold_worker.operations.kill import Killer, wait_gone
from leasehold_worker.timestamps import seconds
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import (
    AWAY,
    ENDED,
    EXITED,
    RUNNING,
    SLEEPING,
    STOPPING,
    SUSPENDED,
    UNKNOWN,
)
from leasehold_worker.workloads.workload import Workload

DEFAULT_GRACE_S: Final = 10.0
LONGEST_GRACE_S: Final = 366 * 86_400.0
"""The longest grace, a year, as in the coordinator."""

KILL_WAIT_S: Final = 15.0
"""Time for a killed workload to end."""


@final
class Termination:
    """The stop operation."""

    def __init__(self, workloads: Workloads, killer: Killer, exit_monitor: ExitMonitor) -> None:
        self._workloads = workloads
        self._exit_monitor = exit_monitor
        self._killer = killer

    async def stop(
        self, workload_id: str, operation: operation_pb2.StopOperation, progress: Progress
    ) -> None:
        """Sends SIGTERM to the first process, and SIGKILL to all after the grace.

        A suspended workload is killed at once: its CUDA calls block, so it could not end by itself. So is a
        restored workload without a handler of SIGTERM, which would kill it while it runs.

        Raises:
            OperationError: UNSAFE_KILL, or PERMISSION_OR_OS: the first process can't be signalled. The
                workload is in its former state. DRIVER_ERROR: a process is stuck in the kernel.
        """
        workload = self._workloads.get(workload_id)
        if workload.state in ENDED:
            progress.already_there = True
            return
        before = workload.state
        target = WorkloadIntent(
            workload_id, workload.members, workload.gpu_uuids, (), parked=before in (SUSPENDED, *AWAY)
        )
        await progress.intend(Intent("stop", (target,)))
        if before in AWAY:
            self._workloads.set_state(workload, STOPPING)
            self._exit_monitor.end(workload, EXITED)
            return
        with trio.CancelScope(shield=True), self._stopping(workload, before):
            if before in (RUNNING, SLEEPING) and self._may_terminate(workload, force=operation.force):
                progress.enter("terminate")
                send_signal(workload.root, signal.SIGTERM)
                await _wait_grace(workload, operation)
            if not workload.ended.is_set():
                await self._kill(workload, progress, force=operation.force)

    async def resume(
        self, workload: Workload, operation: operation_pb2.StopOperation, progress: Progress, *, parked: bool
    ) -> None:
        """Ends a workload whose stop was under way when the worker was killed.

        SIGTERM may have been sent, and is not sent twice: many programs take the second for an order to drop
        everything. The grace starts again.

        Args:
            workload: The workload.
            operation: The stop, with its grace.
            progress: Receives the outcomes of the members.
            parked: The workload was suspended when the stop began.

        Raises:
            OperationError: As for :meth:`stop`.
        """
        if workload.state in ENDED:
            return
        before = SUSPENDED if parked else _state_before(workload)
        if workload.absent:
            self._workloads.set_state(workload, STOPPING)
            self._exit_monitor.end(workload, EXITED)
            return
        with trio.CancelScope(shield=True), self._stopping(workload, before):
            if not parked and self._may_terminate(workload, force=operation.force):
                await _wait_grace(workload, operation)
            if not workload.ended.is_set():
                await self._kill(workload, progress, force=operation.force)

    async def end_processes(
        self,
        workload: Workload,
        progress: Progress,
        *,
        parked: bool,
        told: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Ends the processes of a workload that continues without them, and waits for their end.

        Call it while no task monitors the workload's end.

        Args:
            workload: The workload.
            progress: Receives the outcomes of the members.
            parked: The workload's CUDA calls block, so it is killed at once.
            told: Records that SIGTERM was sent.

        Raises:
            OperationError: UNSAFE_KILL, or DRIVER_ERROR if a process is stuck in the kernel.
        """
        if workload.absent:
            await trio.lowlevel.checkpoint()
            return
        if not parked and self._may_terminate(workload, force=False):
            progress.enter("terminate")
            send_signal(workload.root, signal.SIGTERM)
            if told is not None:
                await _note(told, progress)
            with trio.move_on_after(DEFAULT_GRACE_S):
                await wait_ended(workload.root)
        # Takes as long as suspending the members does, and is not broken off.
        await self._killer.kill(workload, progress)
        deadline = trio.current_time() + KILL_WAIT_S
        while not await wait_gone(workload):
            if trio.current_time() > deadline:
                raise _stuck(workload)
            await self._killer.kill(workload, progress)

    def _may_terminate(self, workload: Workload, *, force: bool) -> bool:
        return force or not workload.restored or catches(workload.root, signal.SIGTERM)

    @contextmanager
    def _stopping(self, workload: Workload, before: workload_pb2.WorkloadState.ValueType) -> Iterator[None]:
        """Sets STOPPING. If the workload can't be signalled or killed, sets its former state again."""
        self._workloads.set_state(workload, STOPPING)
        try:
            yield
        except BaseException as error:
            if workload.state == STOPPING:
                if workload.headless and isinstance(error, OperationError):
                    self._workloads.lose(workload, error)
                else:
                    self._workloads.set_state(workload, before)
            raise

    async def _kill(self, workload: Workload, progress: Progress, *, force: bool) -> None:
        await self._killer.kill(workload, progress, force=force)
        with trio.move_on_after(KILL_WAIT_S):
            await workload.ended.wait()
        if not workload.ended.is_set():
            stuck = _stuck(workload)
            self._workloads.lose(workload, stuck)
            raise stuck


def _state_before(workload: Workload) -> workload_pb2.WorkloadState.ValueType:
    """The state of a STOPPING workload before its stop, unless it was suspended. WEDGED counts as UNKNOWN."""
    if workload.error is not None:
        return UNKNOWN
    return SLEEPING if workload.is_asleep else RUNNING


def _stuck(workload: Workload) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_DRIVER_ERROR,
        f"workload {workload.name} did not end within {KILL_WAIT_S:g} s of SIGKILL, since it "
        "is stuck in the kernel: its GPUs stay leased",
    )


async def _note(told: Callable[[], Awaitable[None]], progress: Progress) -> None:
    """Records a step that can't be taken back, or adds a warning if that fails."""
    try:
        await told()
    except OperationError as error:
        progress.warnings.append(f"the stop is not recorded on disk: {error.message}")


async def _wait_grace(workload: Workload, operation: operation_pb2.StopOperation) -> None:
    has_grace = operation.HasField("grace")
    grace_s = min(max(0.0, seconds(operation.grace)), LONGEST_GRACE_S) if has_grace else DEFAULT_GRACE_S
    with trio.move_on_after(grace_s):
        await workload.ended.wait()
