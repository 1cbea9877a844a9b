"""Recovery of holds, and of commands that were suspending workloads for a run or a restore."""

from typing import final

from leasehold.v1 import errors_pb2

from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal_file import Contents
from leasehold_worker.commands.ledger import Entry, is_local, preempted_by
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.holds import Holds, HoldTerms
from leasehold_worker.operations.placement import Placement


@final
class HoldRecovery:
    """Restores the holds of one worker's earlier run, and settles the commands that begin or take some."""

    def __init__(self, holds: Holds, contents: Contents, commands: Commands) -> None:
        self._holds = holds
        self._contents = contents
        self._commands = commands

    def rebuild(self) -> None:
        """Restores holds, with the begun commands that were beginning or taking some."""
        for hold in self._contents.holds:
            self._holds.adopt(hold)
        for entry in self._commands.open_entries:
            command = entry.command
            if entry.command_id not in self._contents.intents:
                continue  # not begun: it begins anew, or not at all
            if terms := HoldTerms.of(command):
                self._holds.expect(command.workload_id, terms)
            taken_id = command.operation.run.hold_id or command.operation.restore.hold_id
            if preempted_by(command):
                self._holds.prepare_taking(command.workload_id, entry.command_id)
            elif taken_id in self._holds:
                self._holds.prepare_taking(command.workload_id, taken_id)
        self._holds.expire()

    def end_parts(self, waiting: set[str]) -> None:
        """Ends commands of the worker that were a part of an interrupted one, and were not begun.

        Args:
            waiting: Ids of commands that were not begun. The ended ones are removed.
        """
        interrupted = OperationError(
            errors_pb2.ERROR_REASON_INTERRUPTED, "the worker restarted before the command was begun"
        )
        for entry in self._commands.open_entries:
            operation = entry.command.operation
            is_part = bool(operation.suspend.hold_id or operation.restore.hold_id)
            if entry.command_id in waiting and is_part and is_local(entry.command_id):
                waiting.discard(entry.command_id)
                self._commands.settle(entry.command_id, interrupted)

    async def settle(self, entry: Entry, error: OperationError | None, warning: str) -> None:
        """Ends a command, with its hold and the workloads that it preempted.

        Args:
            entry: The command.
            error: Its error. None: it succeeded.
            warning: A warning. Empty: none.
        """
        progress = Progress(lambda _: None, warnings=[warning] if warning else [])
        preempts, hold_id = bool(preempted_by(entry.command)), entry.command_id
        if preempts:
            progress.preempted_workload_ids = self._holds.suspended(hold_id)
        self._holds.settle(entry.command.workload_id, done=error is None)
        if preempts and error is not None:
            await Placement(self._holds).undo(hold_id, progress, self._commands.carry_out)
        self._commands.settle(
            entry.command_id,
            error,
            progress.warnings,
            hold_id=hold_id if hold_id in self._holds else "",
            preempted_workload_ids=progress.preempted_workload_ids,
        )
