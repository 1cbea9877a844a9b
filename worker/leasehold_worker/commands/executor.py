"""The execution of commands: each ends with exactly one outcome.

:mod:`leasehold_worker.commands.ledger` decides about each frame; this module acts.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Final, final

import trio
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.operation_pb2 import Operation
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandSpec, CommandUpdate

from leasehold_worker import tracing
from leasehold_worker.change import Change
from leasehold_worker.commands import journal_file, operation_trace
from leasehold_worker.commands.execution import Execution, Perform
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.journal import Journal
from leasehold_worker.commands.ledger import (
    LOCAL_PREFIX,
    Cancel,
    CommandLedger,
    Effect,
    Entry,
    Forget,
    Keep,
    Refuse,
    Start,
    Tell,
    is_local,
    preempted_by,
    workload_ids,
)
from leasehold_worker.commands.messages import fitting, result_message
from leasehold_worker.commands.operation_metrics import outcome_name, reason_name, record, verb_of
from leasehold_worker.commands.outcomes import outcome_of
from leasehold_worker.commands.progress import Progress
from leasehold_worker.commands.states import (
    ACCEPTED,
    FAILED,
    SUCCEEDED,
    is_terminal,
)
from leasehold_worker.crash_points import crash_point
from leasehold_worker.errors import OperationError, defect
from leasehold_worker.host.stalls import Stalls
from leasehold_worker.log_context import log_context

logger = logging.getLogger(__name__)

LOCAL_TIMEOUT: Final = Duration(seconds=600)
"""The timeout of the coordinator for commands that move memory."""


@final
class Commands:
    """The commands of one agent.

    Args:
        perform: Performs the operation of a command.
        journal: Stores commands and outcomes.
        workloads_of: The workloads with these ids as messages.
        driver_version: Version that results name.
        nursery: Runs their tasks.
        observer: Receives every update in order, once it is on disk.
    """

    def __init__(
        self,
        perform: Perform,
        journal: Journal,
        workloads_of: Callable[[Iterable[str]], Iterable[workload_pb2.Workload]],
        driver_version: str | None,
        nursery: trio.Nursery,
        observer: Callable[[CommandUpdate], None],
    ) -> None:
        self._perform = perform
        self._journal = journal
        self._workloads_of = workloads_of
        self._driver_version = driver_version
        self._nursery = nursery
        self._observer = observer
        self.stalls = Stalls()
        """Detects pauses of this process while its ``run`` runs: commands may have waited then."""
        # An earlier version of the worker may have kept outcomes of any size.
        entries = [replace(entry, update=fitting(entry.update)) for entry in journal.contents.entries]
        self._ledger = CommandLedger(entries)
        self._do(self._ledger.forget_local())
        self._unwritten: set[str] = set()
        """Ids of ended commands whose outcome is not on disk yet."""
        self._executions: dict[str, Execution] = {}
        self._session_id = ""
        """The present session, for the log."""
        self._closed = False
        self._finished = Change()
        self._local: dict[str, Callable[[CommandUpdate], None]] = {}
        """Waiters for the end of the worker's own commands, by command id."""

    def close(self) -> None:
        """Refuses new commands of the coordinator from now on."""
        self._closed = True

    async def wait_finished(self) -> None:
        """Waits until no command is unfinished."""
        while self._ledger.open_entries:
            await self._finished.wait()

    @property
    def open_entries(self) -> list[Entry]:
        """Commands that have not ended."""
        return self._ledger.open_entries

    @property
    def in_flight(self) -> list[str]:
        """Ids of the commands without an outcome on disk."""
        ids = [*(entry.command_id for entry in self._ledger.open_entries), *self._unwritten]
        return [command_id for command_id in ids if not is_local(command_id)]

    @property
    def unacknowledged(self) -> list[CommandUpdate]:
        """Outcomes on disk that the coordinator has not acknowledged."""
        return [
            update
            for update in self._ledger.unacknowledged
            if update.command_id not in self._unwritten and not is_local(update.command_id)
        ]

    def receive(self, frame: CommandFrame, epoch: int, session_id: str = "") -> None:
        """Accepts a command or its cancellation. A known command is answered with its current state.

        Args:
            frame: The frame.
            epoch: The highest epoch that this worker has seen.
            session_id: The session, for the log. Empty: the worker's own command.
        """
        self._session_id = session_id or self._session_id
        crash_point("command-received")
        refusal = self._refusal(frame.command)
        received_s = time.time() - self.stalls.waited_s()
        self._carry_out(self._ledger.receive(frame, epoch, received_s, refusal))

    async def carry_out(
        self, workload_id: str, operation: Operation, expected_generation: int | None = None
    ) -> CommandUpdate:
        """Runs a command of the worker itself, and waits for its end.

        The coordinator sees the effect on the workload, but not the command.

        Args:
            workload_id: The workload.
            operation: The operation.
            expected_generation: Generation that the workload must still have. None: any.

        Returns:
            The outcome. REJECTED with WORKLOAD_BUSY: another command of the workload has not ended.
        """
        command_id = f"{LOCAL_PREFIX}{uuid.uuid4().hex[:16]}"
        command = CommandSpec(
            command_id=command_id, workload_id=workload_id, operation=operation, timeout=LOCAL_TIMEOUT
        )
        if expected_generation is not None:
            command.expected_generation = expected_generation
        ended = trio.Event()
        outcomes: list[CommandUpdate] = []

        def note(update: CommandUpdate) -> None:
            outcomes.append(update)
            ended.set()

        self._local[command_id] = note
        try:
            self.receive(CommandFrame(command=command), 0)
            await ended.wait()
        finally:
            del self._local[command_id]
        return outcomes[0]

    def acknowledge(self, command_id: str) -> None:
        """Records that the coordinator has stored the outcome, and drops old commands."""
        self._carry_out(self._ledger.acknowledge(command_id, time.time()))
        crash_point("acknowledged")

    def resume(self, entry: Entry) -> None:
        """Begins a command that an earlier run of the worker accepted but did not begin."""
        self._carry_out([Start(entry)])

    def settle(
        self,
        command_id: str,
        error: OperationError | None,
        warnings: Sequence[str] = (),
        *,
        hold_id: str = "",
        preempted_workload_ids: tuple[str, ...] = (),
    ) -> None:
        """Ends a command that an earlier run of the worker had begun, with the outcome that was found.

        Args:
            command_id: The command.
            error: The error. None: the command succeeded.
            warnings: Its warnings.
            hold_id: The hold on the released GPUs. Empty: none.
            preempted_workload_ids: Workloads that a preempt suspended, and that are suspended now.
        """
        progress = Progress(
            lambda _: None,
            warnings=list(warnings),
            hold_id=hold_id,
            preempted_workload_ids=preempted_workload_ids,
        )
        self._carry_out(self._ledger.progress(command_id, "settle"))
        entry = next(entry for entry in self._ledger.open_entries if entry.command_id == command_id)
        with self._log_context(entry):
            # The command began in an earlier process, so its duration is unknown.
            self._finish(entry.command, FAILED if error else SUCCEEDED, error, progress, None)

    def _refusal(self, command: CommandSpec) -> OperationError | None:
        if self._closed and not is_local(command.command_id):
            elsewhere = "choose another worker, or " if command.operation.HasField("run") else ""
            return OperationError(
                errors_pb2.ERROR_REASON_WORKER_DRAINING,
                f"the worker is stopping: {elsewhere}try again once it has started again",
            )
        if self._journal.refusal is not None:
            return self._journal.refusal
        generations = [w.status.generation for w in self._workloads_of([command.workload_id])]
        if command.HasField("expected_generation") and generations != [command.expected_generation]:
            return OperationError(
                errors_pb2.ERROR_REASON_GENERATION_MISMATCH,
                f"workload {command.workload_id} has changed since generation "
                f"{command.expected_generation}: read it again",
            )
        return None

    def _carry_out(self, effects: list[Effect]) -> None:
        """Applies the effects of the ledger in order. Effects after a Keep wait for its write."""
        if not effects:
            return
        if isinstance(effects[0], Refuse | Forget):  # nothing waits for their writes
            self._do(effects)
            return
        if not isinstance(effects[0], Keep):
            self._journal.after_all(partial(self._do, effects))
            return
        entry, following = effects[0].entry, effects[1:]
        begins = any(isinstance(effect, Start) for effect in following)
        if any(isinstance(effect, Tell) and is_terminal(effect.update.state) for effect in following):
            self._unwritten.add(entry.command_id)
        self._journal.put(
            ("commands", entry.command_id),
            journal_file.keep_command(entry),
            partial(self._do, following),
            refused=partial(self._refuse, entry.command_id) if begins else None,
            later=entry.acknowledged_s is not None,  # an outcome that was sent twice is acknowledged twice
        )

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Keep():
                    raise ValueError("a Keep comes first")
                case Tell(update) | Refuse(update):
                    self._tell(update)
                case Start(entry):
                    self._executions[entry.command_id] = execution = Execution(entry)
                    self._nursery.start_soon(self._execute, execution)
                case Cancel(command_id):
                    if command_id in self._executions:
                        self._executions[command_id].cancel()
                case Forget(command_ids):
                    for command_id in command_ids:
                        statements = journal_file.forget_command(command_id)
                        self._journal.put(("commands", command_id), statements, later=True)

    def _tell(self, update: CommandUpdate) -> None:
        ended = is_terminal(update.state)
        if ended:
            self._unwritten.discard(update.command_id)
        if ended or update.state == ACCEPTED:
            crash_point("outcome-journaled" if ended else "command-journaled")
        if is_local(update.command_id):
            self._tell_locally(update)
            return
        self._observer(update)
        if ended:
            crash_point("outcome-told")

    def _tell_locally(self, update: CommandUpdate) -> None:
        if is_terminal(update.state):
            self.acknowledge(update.command_id)
            if update.command_id in self._local:
                self._local[update.command_id](update)

    def _refuse(self, command_id: str, error: OperationError) -> None:
        self._do(self._ledger.refuse(command_id, error))

    async def _execute(self, execution: Execution) -> None:
        entry = execution.entry
        with self._log_context(entry):
            verb = verb_of(entry.command)
            logger.info("%s begins%s", verb, _for_whom(entry.command), extra={"verb": verb})
            await self._perform_and_finish(execution)

    def _log_context(self, entry: Entry) -> AbstractContextManager[None]:
        return log_context(
            session=self._session_id if entry.epoch else "",
            epoch=str(entry.epoch or ""),
            command=entry.command_id,
            workload=",".join(workload_ids(entry.command)),
            trace=tracing.trace_id(entry.command.trace_parent),
        )

    async def _perform_and_finish(self, execution: Execution) -> None:
        command = execution.entry.command
        started = time.monotonic()
        progress = Progress(partial(self._enter, command), partial(self._intend, command))
        error: OperationError | None = None
        execution.begin()
        with execution.scope:
            self._carry_out(self._ledger.progress(command.command_id, ""))
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
                await self._perform(command, progress, self.carry_out)
            except OperationError as raised:
                error = raised
            except Exception:
                logger.exception("the command failed because of a defect")
                error = defect()
        crash_point("operation-ended")
        is_undone = execution.is_undone(error)
        progress.close(failed=is_undone or error is not None)
        if is_undone:
            error = execution.why_undone(progress)
        elif error is None and (too_late := execution.why_too_late()):
            progress.warnings.append(too_late)
        del self._executions[command.command_id]
        state, duration_s = outcome_of(error, progress), time.monotonic() - started
        record(command, state, error, progress, duration_s)
        operation_trace.export(command, state, error, progress, started)
        self._finish(command, state, error, progress, duration_s)

    def _enter(self, command: CommandSpec, phase: str) -> None:
        logger.debug("phase %s", phase, extra={"verb": verb_of(command), "phase": phase})
        self._carry_out(self._ledger.progress(command.command_id, phase))
        crash_point(f"phase-{phase}")

    async def _intend(self, command: CommandSpec, intent: Intent) -> None:
        await self._journal.write(
            ("intents", command.command_id), journal_file.keep_intent(command.command_id, intent)
        )
        crash_point(f"intent-{intent.phase}")

    def _finish(
        self,
        command: CommandSpec,
        state: CommandState.ValueType,
        error: OperationError | None,
        progress: Progress,
        duration_s: float | None,
    ) -> None:
        update = CommandUpdate(
            command_id=command.command_id,
            state=state,
            result=result_message(progress, duration_s, self._driver_version),
            error=error.to_proto() if error else None,
            workloads=self._workloads_of([*workload_ids(command), *preempted_by(command)]),
        )
        logger.log(
            logging.WARNING if state == FAILED else logging.INFO,
            "%s %s%s%s",
            verb_of(command),
            outcome_name(state),
            "" if duration_s is None else f" after {duration_s:.3f} s",
            f": {error.message}" if error else "",
            extra={
                "verb": verb_of(command),
                "outcome": outcome_name(state),
                **({} if duration_s is None else {"duration_s": round(duration_s, 6)}),
                **({"reason": reason_name(error)} if error else {}),
            },
        )
        self._carry_out(self._ledger.finish(fitting(update)))
        self._finished.notify()


def _for_whom(command: CommandSpec) -> str:
    """The owner of a command's workload, for the log."""
    return f" for {command.owner}" if command.owner else ""
