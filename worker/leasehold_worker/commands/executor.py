"""A command in, exactly one outcome out.

What is to be done about each frame is decided in :mod:`leasehold_worker.commands.ledger`; here it is done.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, final

import trio
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandState, Operation
from leasehold.v1.worker_session_pb2 import CommandFrame, CommandUpdate

from leasehold_worker.commands import journal_file
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
    workload_ids,
)
from leasehold_worker.commands.messages import fitting, result_message
from leasehold_worker.commands.progress import Progress
from leasehold_worker.commands.states import (
    ACCEPTED,
    CANCELLED,
    EXPIRED,
    FAILED,
    REJECTED,
    SUCCEEDED,
    is_terminal,
)
from leasehold_worker.crash_points import crash_point
from leasehold_worker.errors import OperationError, defect
from leasehold_worker.host.stalls import Stalls
from leasehold_worker.timestamps import seconds

logger = logging.getLogger(__name__)

LOCAL_TIMEOUT: Final = Duration(seconds=600)
"""As for commands of the coordinator that move memory."""

REASONS_OF_REFUSAL: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
        errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
        errors_pb2.ERROR_REASON_UNKNOWN_GPU,
        errors_pb2.ERROR_REASON_WRONG_STATE,
        errors_pb2.ERROR_REASON_NO_FREE_GPU,
        errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU,
        errors_pb2.ERROR_REASON_DUPLICATE_GPU,
        errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY,
        errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
        errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER,
        errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
        errors_pb2.ERROR_REASON_NOT_A_CUDA_PROCESS,
        errors_pb2.ERROR_REASON_NOT_READY,
        errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
        errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
        errors_pb2.ERROR_REASON_DEVICE_NODE_MISSING,
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
        errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
        errors_pb2.ERROR_REASON_CORDONED,
        errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
        errors_pb2.ERROR_REASON_FOREIGN_PROCESS,
        errors_pb2.ERROR_REASON_ALREADY_REGISTERED,
        errors_pb2.ERROR_REASON_UNKNOWN_PROCESS,
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        errors_pb2.ERROR_REASON_NOTHING_FREED,
        errors_pb2.ERROR_REASON_STATE_WOULD_BE_LOST,
        errors_pb2.ERROR_REASON_KERNEL_NOT_READY,
        errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT,
        errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
        errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
        errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE,
        errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
        # The preflight asks the driver and NVML where the members are.
        errors_pb2.ERROR_REASON_MEMBERS_CHANGED,
        errors_pb2.ERROR_REASON_DRIVER_TIMEOUT,
        errors_pb2.ERROR_REASON_DRIVER_ERROR,
    }
)
"""With no driver call made yet that changes a process, these mean REJECTED: nothing was begun."""


BEGUN: Final = frozenset({"hooks", "save", "image", "resume", "start", "load", "terminate", "kill"})
"""Phases in which something is done to a workload without the driver."""


class CarryOut(Protocol):
    """Carries out a command of the worker's own."""

    async def __call__(
        self, workload_id: str, operation: Operation, expected_generation: int | None = None
    ) -> CommandUpdate:
        """Carries it out, if the workload has not changed, and returns its outcome."""


class Perform(Protocol):
    """Carries out what a command says, by commands of the worker's own where it has to."""

    async def __call__(self, command: Command, progress: Progress, carry_out: CarryOut) -> None:
        """Carries it out.

        Raises:
            OperationError: It failed, or was refused.
        """


@final
class Commands:
    """The commands of one agent.

    Args:
        perform: Carries out what a command says.
        journal: Keeps them.
        workloads_of: The workloads with these ids as messages.
        driver_version: Named in results.
        nursery: Where they run.
        observer: Told every update, once it is on disk, in order.
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
        """Sees when this process did not run, while its ``run`` runs: commands may have waited then."""
        # An earlier version of the worker may have kept outcomes of any size.
        entries = [replace(entry, update=fitting(entry.update)) for entry in journal.contents.entries]
        self._ledger = CommandLedger(entries)
        self._unwritten: set[str] = set()
        """Ids of commands that have ended, and whose outcome is not on disk yet."""
        self._executions: dict[str, _Execution] = {}
        self._closed = False
        self._finished = trio.Event()
        self._local: dict[str, Callable[[CommandUpdate], None]] = {}
        """Who waits for the end of a command of the worker's own, by its id."""

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
        """Ids of the commands that have not ended as far as may be told: their outcome is not on disk."""
        ids = [*(entry.command_id for entry in self._ledger.open_entries), *self._unwritten]
        return [command_id for command_id in ids if not is_local(command_id)]

    @property
    def unacknowledged(self) -> list[CommandUpdate]:
        """Outcomes that are on disk and that the coordinator has not acknowledged."""
        return [
            update
            for update in self._ledger.unacknowledged
            if update.command_id not in self._unwritten and not is_local(update.command_id)
        ]

    def receive(self, frame: CommandFrame, epoch: int) -> None:
        """Takes a command or its cancellation. What was seen before is answered with where it stands."""
        crash_point("command-received")
        refusal = self._refusal(frame.command)
        received_s = time.time() - self.stalls.waited_s()
        self._carry_out(self._ledger.receive(frame, epoch, received_s, refusal))

    async def carry_out(
        self, workload_id: str, operation: Operation, expected_generation: int | None = None
    ) -> CommandUpdate:
        """Carries out a command of the worker's own, as one of the coordinator's, and waits for its end.

        The coordinator hears of what it does to the workload, and not of the command.

        Args:
            workload_id: The workload.
            operation: What to do.
            expected_generation: The workload must not have changed since. None: it may.

        Returns:
            Its outcome. REJECTED with WORKLOAD_BUSY: another command of the workload has not ended.
        """
        command_id = f"{LOCAL_PREFIX}{uuid.uuid4().hex[:16]}"
        command = Command(
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
        """Notes that the coordinator has stored the outcome, and forgets what is old."""
        self._carry_out(self._ledger.acknowledge(command_id, time.time()))
        crash_point("acknowledged")

    def resume(self, entry: Entry) -> None:
        """Begins a command that an earlier start of the worker took in and had not begun."""
        self._carry_out([Start(entry)])

    def settle(self, command_id: str, error: OperationError | None, warning: str) -> None:
        """Ends a command that an earlier start of the worker had begun, as it was found.

        Args:
            command_id: The command.
            error: Why it did not succeed. None: it did.
            warning: What is said beside that. Empty: nothing.
        """
        progress = Progress(lambda _: None, warnings=[warning] if warning else [])
        self._carry_out(self._ledger.progress(command_id, "settle"))
        entry = next(entry for entry in self._ledger.open_entries if entry.command_id == command_id)
        self._finish(entry.command, FAILED if error else SUCCEEDED, error, progress, 0.0)

    def _refusal(self, command: Command) -> OperationError | None:
        if self._closed and not is_local(command.command_id):
            return OperationError(
                errors_pb2.ERROR_REASON_WORKER_DRAINING, "the worker is stopping: choose another worker"
            )
        if self._journal.refusal is not None:
            return self._journal.refusal
        generations = [w.status.generation for w in self._workloads_of([command.workload_id])]
        if command.HasField("expected_generation") and generations != [command.expected_generation]:
            return OperationError(
                errors_pb2.ERROR_REASON_GENERATION_MISMATCH,
                f"workload {command.workload_id} has changed since generation {command.expected_generation}: "
                "read it again",
            )
        return None

    def _carry_out(self, effects: list[Effect]) -> None:
        """Does what the ledger says, in its order, and what follows a Keep only once that is on disk."""
        if not effects:
            return
        if isinstance(effects[0], Refuse):
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
            later=entry.acknowledged_s is not None,  # an outcome that is told twice is acknowledged twice
        )

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Keep():
                    raise ValueError("a Keep comes first")
                case Tell(update) | Refuse(update):
                    self._tell(update)
                case Start(entry):
                    self._executions[entry.command_id] = execution = _Execution(entry)
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

    async def _execute(self, execution: "_Execution") -> None:
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
                logger.exception("command %s failed by a defect", command.command_id)
                error = defect()
        crash_point("operation-ended")
        if execution.scope.cancelled_caught:
            error = execution.why_undone(progress)
        elif error is None and (too_late := execution.why_too_late()):
            progress.warnings.append(too_late)
        progress.close(failed=error is not None)
        del self._executions[command.command_id]
        self._finish(command, _outcome(error, progress), error, progress, time.monotonic() - started)

    def _enter(self, command: Command, phase: str) -> None:
        self._carry_out(self._ledger.progress(command.command_id, phase))
        crash_point(f"phase-{phase}")

    async def _intend(self, command: Command, intent: Intent) -> None:
        await self._journal.write(
            ("intents", command.command_id), journal_file.keep_intent(command.command_id, intent)
        )
        crash_point(f"intent-{intent.phase}")

    def _finish(
        self,
        command: Command,
        state: CommandState.ValueType,
        error: OperationError | None,
        progress: Progress,
        duration_s: float,
    ) -> None:
        update = CommandUpdate(
            command_id=command.command_id,
            state=state,
            result=result_message(progress, duration_s, self._driver_version),
            error=error.to_proto() if error else None,
            workloads=self._workloads_of(workload_ids(command)),
        )
        logger.info(
            "command %s: %s%s",
            command.command_id,
            CommandState.Name(state).removeprefix("COMMAND_STATE_"),
            f": {error.message}" if error else "",
        )
        self._carry_out(self._ledger.finish(fitting(update)))
        self._finished.set()
        self._finished = trio.Event()


@final
class _Execution:
    """A command whose operation is under way."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.scope = trio.CancelScope()
        self._cancelled = entry.cancel_requested

    def begin(self) -> None:
        """Sets the deadline: the timeout counts from when the command may have come first."""
        timeout_s = seconds(self.entry.command.timeout)
        if timeout_s > 0:
            waited_s = min(max(0.0, time.time() - self.entry.received_s), timeout_s)
            self.scope.deadline = trio.current_time() + timeout_s - waited_s
        if self._cancelled:
            self.scope.cancel()

    def cancel(self) -> None:
        """Somebody asked for it."""
        self._cancelled = True
        self.scope.cancel()

    def why_undone(self, progress: Progress) -> OperationError:
        """Why an operation ended that was cancelled or timed out before its point of no return."""
        for _, outcome in progress.outcomes:
            if outcome.rolled_back is False and outcome.error is not None:
                return outcome.error
        undone = "everything was undone" if _has_called(progress) else "nothing was done"
        if progress.warnings:
            undone += ", but for what the warnings say"
        if self._cancelled:
            return OperationError(errors_pb2.ERROR_REASON_CANCELLED, f"cancelled in time: {undone}")
        return OperationError(
            errors_pb2.ERROR_REASON_EXPIRED, f"its timeout passed before its point of no return: {undone}"
        )

    def why_too_late(self) -> str | None:
        """What to say of a cancellation or timeout that came after the point of no return."""
        if self._cancelled:
            return "the cancellation came after the point of no return, so it was finished"
        if trio.current_time() > self.scope.deadline:
            return "its timeout passed after the point of no return, so it was finished"
        return None


def _outcome(error: OperationError | None, progress: Progress) -> CommandState.ValueType:
    if error is None:
        return SUCCEEDED
    if error.reason == errors_pb2.ERROR_REASON_CANCELLED:
        return CANCELLED
    if _has_called(progress):
        return FAILED
    if error.reason == errors_pb2.ERROR_REASON_EXPIRED:
        return EXPIRED
    return REJECTED if error.reason in REASONS_OF_REFUSAL else FAILED


def _has_called(progress: Progress) -> bool:
    called = any(outcome.phases for _, outcome in progress.outcomes)
    return called or any(phase.name in BEGUN for phase in progress.phases)
