"""Suspend some workloads, then run or restore another on their GPUs: all or nothing.

The suspends are commands of the worker itself. Their GPUs join one hold, whose id is that of the command that
preempts. So nobody else gets these GPUs, and the journal knows at each moment which workloads are to be
restored if the command fails.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar, final

import trio
from leasehold.v1.operation_pb2 import Operation, RestoreOperation, RunOperation, SuspendOperation
from leasehold.worker.v1.session_pb2 import CommandSpec

from leasehold_worker.commands.execution import CarryOut
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.ledger import preempted_by
from leasehold_worker.commands.progress import Progress
from leasehold_worker.commands.states import SUCCEEDED
from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.leasing.holds import Holds

Operating = TypeVar("Operating", RunOperation, RestoreOperation)

PREEMPT_PHASE: Final = "preempt"
"""The phase of the suspends, and the first intent of the command."""


@final
class Placement:
    """Makes GPUs available for the runs and restores of one worker: by a hold, or by suspends."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds

    @asynccontextmanager
    async def room_for(
        self, command: CommandSpec, operation: Operating, progress: Progress, carry_out: CarryOut
    ) -> AsyncIterator[Operating]:
        """The operation of a command, with the hold that it takes in this context, if any.

        An exception in the context returns the GPUs to the hold, or restores the preempted workloads.

        Raises:
            OperationError: UNKNOWN_HOLD, WORKLOAD_BUSY, INVALID_ARGUMENT, or the error of a suspend.
        """
        preempted = preempted_by(command)
        if not preempted:
            with self._holds.taken_by(command.workload_id, operation.hold_id):
                yield operation
            return
        if operation.hold_id:
            raise invalid(
                "hold_id", "a hold and workloads to preempt exclude each other: give one of the two"
            )
        hold_id = command.command_id
        progress.enter(PREEMPT_PHASE)
        await progress.intend(Intent(PREEMPT_PHASE, ()))
        self._holds.prepare_taking(command.workload_id, hold_id)
        done = False
        try:
            for workload_id in preempted:
                await trio.lowlevel.checkpoint_if_cancelled()
                await self._suspend(workload_id, hold_id, carry_out)
            yield _taking(operation, hold_id if hold_id in self._holds else "")
            done = True
        finally:
            progress.preempted_workload_ids = self._holds.suspended(hold_id)
            self._holds.settle(command.workload_id, done=done)
            if not done:
                with trio.CancelScope(shield=True):
                    await self.undo(hold_id, progress, carry_out)

    async def _suspend(self, workload_id: str, hold_id: str, carry_out: CarryOut) -> None:
        with trio.CancelScope(shield=True):  # shielded: a cancelled wait would leave the suspend running
            operation = Operation(suspend=SuspendOperation(hold_id=hold_id))
            outcome = await carry_out(workload_id, operation)
        if outcome.state != SUCCEEDED:
            raise OperationError(
                outcome.error.reason,
                f"workload {workload_id} can't be suspended: {outcome.error.message}",
                {**outcome.error.metadata, "workload_id": workload_id},
            )

    async def undo(self, hold_id: str, progress: Progress, carry_out: CarryOut) -> None:
        """Restores the preempted workloads of a progress on their GPUs, last first, and ends the hold.

        The progress keeps those that can't be restored. They stay suspended.
        """
        left: list[str] = []
        for workload_id in reversed(progress.preempted_workload_ids):
            # The hold has ended if whatever has failed still uses all of its GPUs.
            taken_id = hold_id if hold_id in self._holds else ""
            operation = Operation(restore=RestoreOperation(hold_id=taken_id))
            outcome = await carry_out(workload_id, operation)
            what = "restored after the failure"
            if outcome.state != SUCCEEDED:
                left.append(workload_id)
                what = f"can't be restored: {outcome.error.message}"
            progress.warnings.append(f"workload {workload_id} was suspended, and {what}")
        progress.preempted_workload_ids = tuple(reversed(left))
        if hold_id in self._holds:
            self._holds.release(hold_id)


def _taking(operation: Operating, hold_id: str) -> Operating:
    """The operation with the hold that it takes."""
    copy = type(operation)()
    copy.CopyFrom(operation)
    copy.hold_id = hold_id
    return copy
