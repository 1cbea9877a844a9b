"""A running command, and the protocols of its operation."""

import time
from typing import Protocol, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.operation_pb2 import Operation
from leasehold.worker.v1.session_pb2 import CommandSpec, CommandUpdate

from leasehold_worker.commands.ledger import (
    Entry,
)
from leasehold_worker.commands.outcomes import _has_called
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.timestamps import seconds


class CarryOut(Protocol):
    """Runs a command of the worker itself."""

    async def __call__(
        self, workload_id: str, operation: Operation, expected_generation: int | None = None
    ) -> CommandUpdate:
        """Runs the command if the workload has not changed, and returns its outcome."""


class Perform(Protocol):
    """Performs the operation of a command, with further commands where needed."""

    async def __call__(self, command: CommandSpec, progress: Progress, carry_out: CarryOut) -> None:
        """Performs the operation.

        Raises:
            OperationError: The operation failed, or was refused.
        """


@final
class Execution:
    """A command whose operation is under way."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.scope = trio.CancelScope()
        self._cancelled = entry.cancel_requested

    def begin(self) -> None:
        """Sets the deadline: the timeout counts from the earliest possible arrival of the command."""
        timeout_s = seconds(self.entry.command.timeout)
        if timeout_s > 0:
            waited_s = min(max(0.0, time.time() - self.entry.received_s), timeout_s)
            self.scope.deadline = trio.current_time() + timeout_s - waited_s
        if self._cancelled:
            self.scope.cancel()

    def cancel(self) -> None:
        """Requests the cancellation."""
        self._cancelled = True
        self.scope.cancel()

    def is_undone(self, error: OperationError | None) -> bool:
        """Whether the cancellation or the timeout has ended the operation before its point of no return.

        A cancellation waits for the end of a lock, which may time out.

        Args:
            error: The error of the operation.
        """
        has_waited = error is not None and error.reason == errors_pb2.ERROR_REASON_LOCK_TIMEOUT
        return self.scope.cancelled_caught or (self._cancelled and has_waited)

    def why_undone(self, progress: Progress) -> OperationError:
        """The error of an operation that was cancelled or timed out before its point of no return."""
        for _, outcome in progress.outcomes:
            if outcome.rolled_back is False and outcome.error is not None:
                return outcome.error
        undone = "rolled back" if _has_called(progress) else "nothing had begun"
        if progress.stays_changed or progress.preempted_workload_ids:
            undone = "not all is undone"
        if progress.warnings:
            undone += " (see warnings)"
        if self._cancelled:
            return OperationError(
                errors_pb2.ERROR_REASON_CANCELLED, f"cancelled before the point of no return; {undone}"
            )
        if progress.refusal is not None:
            return progress.refusal
        return OperationError(
            errors_pb2.ERROR_REASON_EXPIRED, f"timed out before the point of no return; {undone}"
        )

    def why_too_late(self) -> str | None:
        """The warning about a cancellation or timeout after the point of no return."""
        if self._cancelled:
            return "the cancellation came after the point of no return, so the operation was completed"
        if trio.current_time() > self.scope.deadline:
            return "the timeout passed after the point of no return, so the operation was completed"
        return None
