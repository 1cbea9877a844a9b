"""A command in, exactly one outcome out.

A repeated command id is answered with the state already reached, and outcomes are told until the
coordinator has acknowledged them. Both are kept in memory: they do not outlive the agent.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, worker_session_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.worker_session_pb2 import CommandUpdate

from leasehold_worker import wire
from leasehold_worker.command_states import (
    ACCEPTED,
    CANCELLED,
    EXPIRED,
    FAILED,
    REJECTED,
    RUNNING,
    SUCCEEDED,
    TRANSITIONS,
    is_terminal,
)
from leasehold_worker.errors import OperationError
from leasehold_worker.operations import Operations
from leasehold_worker.report import Report
from leasehold_worker.stopping import Stopping

logger = logging.getLogger(__name__)

UNFINISHED_LIMIT: Final = 8
"""Commands that may be unfinished at once."""

FINISHED_LIMIT: Final = 1024
"""Acknowledged commands that are remembered, so that a late duplicate finds its answer."""

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
        errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
        errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
        errors_pb2.ERROR_REASON_DEVICE_NODE_MISSING,
    }
)
"""With no driver call made yet, these mean REJECTED: nothing was begun."""


@dataclass(eq=False, slots=True)
class _Entry:
    command: Command
    state: CommandState.ValueType
    update: CommandUpdate
    acknowledged: bool = False
    cancel_requested: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@final
class Commands:
    """The commands of one agent. Updates go to the observer, in order."""

    def __init__(
        self,
        operations: Operations,
        stopping: Stopping,
        workloads_of: Callable[[Iterable[str]], Iterable[workload_pb2.Workload]],
        driver_version: str | None,
        nursery: trio.Nursery,
        observer: Callable[[CommandUpdate], None],
    ) -> None:
        self._operations = operations
        self._stopping = stopping
        self._workloads_of = workloads_of
        self._driver_version = driver_version
        self._nursery = nursery
        self._observer = observer
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        self._finished = trio.Condition()

    def close(self) -> None:
        """Refuses new commands from now on."""
        self._closed = True

    async def wait_finished(self) -> None:
        """Waits until no command is unfinished."""
        async with self._finished:
            while self.in_flight:
                await self._finished.wait()

    @property
    def in_flight(self) -> list[str]:
        """Ids of the commands that have not ended."""
        return [id_ for id_, entry in self._entries.items() if not is_terminal(entry.state)]

    @property
    def unacknowledged(self) -> list[CommandUpdate]:
        """Outcomes that the coordinator has not acknowledged."""
        return [
            entry.update
            for entry in self._entries.values()
            if is_terminal(entry.state) and not entry.acknowledged
        ]

    def receive(self, frame: worker_session_pb2.CommandFrame) -> None:
        """Takes a command or its cancellation. What was seen before is answered with where it stands."""
        command_id = frame.command.command_id
        entry = self._entries.get(command_id)
        if entry is None:
            self._begin(frame)
        elif frame.cancel and not is_terminal(entry.state):
            entry.cancel_requested = True
            entry.scope.cancel()
        else:
            self._observer(entry.update)

    def acknowledge(self, command_id: str) -> None:
        """Notes that the coordinator has stored the outcome, and forgets the oldest of those."""
        entry = self._entries.get(command_id)
        if entry is not None and is_terminal(entry.state):
            entry.acknowledged = True
        done = [id_ for id_, entry in self._entries.items() if entry.acknowledged]
        for id_ in done[: max(0, len(done) - FINISHED_LIMIT)]:
            del self._entries[id_]

    def _begin(self, frame: worker_session_pb2.CommandFrame) -> None:
        command = frame.command
        refusal = self._refusal(command)
        state = REJECTED if refusal or frame.cancel else ACCEPTED
        if frame.cancel and refusal is None:
            refusal = OperationError(errors_pb2.ERROR_REASON_CANCELLED, "cancelled before it was accepted")
        update = CommandUpdate(
            command_id=command.command_id, state=state, error=refusal.to_proto() if refusal else None
        )
        entry = _Entry(command, state, update)
        self._entries[command.command_id] = entry
        self._observer(update)
        if state == ACCEPTED:
            self._nursery.start_soon(self._execute, entry)

    def _refusal(self, command: Command) -> OperationError | None:
        if self._closed:
            return OperationError(
                errors_pb2.ERROR_REASON_WORKER_DRAINING, "the worker is stopping: choose another worker"
            )
        generations = [w.status.generation for w in self._workloads_of([command.workload_id])]
        if command.HasField("expected_generation") and generations != [command.expected_generation]:
            return OperationError(
                errors_pb2.ERROR_REASON_GENERATION_MISMATCH,
                f"workload {command.workload_id} has changed since generation {command.expected_generation}: "
                "read it again",
            )
        busy = [self._entries[id_].command for id_ in self.in_flight]
        for workload_id in workload_ids(command):
            if any(workload_id in workload_ids(other) for other in busy):
                return OperationError(
                    errors_pb2.ERROR_REASON_WORKLOAD_BUSY,
                    f"workload {workload_id} has a command that has not ended: wait for it, or cancel it",
                )
        if len(busy) >= UNFINISHED_LIMIT:
            return OperationError(
                errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
                f"the worker has {UNFINISHED_LIMIT} unfinished commands, which is its limit: try again later",
            )
        return None

    async def _execute(self, entry: _Entry) -> None:
        started = time.monotonic()
        report = Report(partial(self._tell_phase, entry))
        error: OperationError | None = None
        timeout_s = entry.command.timeout.ToTimedelta().total_seconds()
        entry.scope.deadline = trio.current_time() + timeout_s if timeout_s > 0 else float("inf")
        with entry.scope:
            self._tell(entry, RUNNING)
            try:
                await self._operation(entry.command, report)()
            except OperationError as raised:
                error = raised
            except Exception:
                logger.exception("command %s failed by a defect", entry.command.command_id)
                error = OperationError(
                    errors_pb2.ERROR_REASON_INTERNAL, "a defect of Leasehold: the worker's log says more"
                )
        if entry.scope.cancelled_caught:
            error = _cancellation(entry, report)
        elif error is None and (too_late := _why_too_late(entry)):
            report.warnings.append(too_late)
        report.close(failed=error is not None)
        self._finish(entry, report, error, time.monotonic() - started)
        async with self._finished:
            self._finished.notify_all()

    def _operation(self, command: Command, report: Report) -> Callable[[], Awaitable[None]]:
        operation, operations = command.operation, self._operations
        match operation.WhichOneof("kind"):
            case "run":
                return partial(operations.run, command.workload_id, operation.run, report)
            case "suspend":
                return partial(operations.suspend, command.workload_id, operation.suspend, report)
            case "restore":
                return partial(operations.restore, command.workload_id, operation.restore, report)
            case "remap":
                return partial(operations.remap, operation.remap, report)
            case "stop":
                return partial(self._stopping.stop, command.workload_id, operation.stop, report)
            case None:
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                    "this worker is older than the coordinator and does not know the operation: update it",
                )

    def _finish(self, entry: _Entry, report: Report, error: OperationError | None, duration_s: float) -> None:
        result = wire.command_result(report, duration_s, self._driver_version)
        update = CommandUpdate(
            command_id=entry.command.command_id,
            state=_outcome(error, report),
            result=result,
            error=error.to_proto() if error else None,
            workloads=self._workloads_of(workload_ids(entry.command)),
        )
        logger.info(
            "command %s: %s%s",
            entry.command.command_id,
            CommandState.Name(update.state).removeprefix("COMMAND_STATE_"),
            f": {error.message}" if error else "",
        )
        self._change(entry, update)

    def _tell(self, entry: _Entry, state: CommandState.ValueType, phase: str = "") -> None:
        self._change(entry, CommandUpdate(command_id=entry.command.command_id, state=state, phase=phase))

    def _tell_phase(self, entry: _Entry, phase: str) -> None:
        self._tell(entry, RUNNING, phase)

    def _change(self, entry: _Entry, update: CommandUpdate) -> None:
        if update.state not in TRANSITIONS[entry.state]:
            states = f"{CommandState.Name(entry.state)} to {CommandState.Name(update.state)}"
            raise ValueError(f"a command can't go from {states}")
        entry.state, entry.update = update.state, update
        self._observer(update)


def workload_ids(command: Command) -> list[str]:
    """The workloads that a command is about."""
    if command.operation.HasField("remap"):
        return [move.workload_id for move in command.operation.remap.moves]
    return [command.workload_id]


def _outcome(error: OperationError | None, report: Report) -> CommandState.ValueType:
    if error is None:
        return SUCCEEDED
    if error.reason == errors_pb2.ERROR_REASON_CANCELLED:
        return CANCELLED
    if _has_called(report):
        return FAILED
    if error.reason == errors_pb2.ERROR_REASON_EXPIRED:
        return EXPIRED
    return REJECTED if error.reason in REASONS_OF_REFUSAL else FAILED


def _has_called(report: Report) -> bool:
    return any(outcome.phases for _, outcome in report.outcomes)


def _cancellation(entry: _Entry, report: Report) -> OperationError:
    """Why an operation ended that was cancelled or timed out before its point of no return."""
    for _, outcome in report.outcomes:
        if outcome.rolled_back is False and outcome.error is not None:
            return outcome.error
    undone = "everything was undone" if _has_called(report) else "nothing was done"
    if entry.cancel_requested:
        return OperationError(errors_pb2.ERROR_REASON_CANCELLED, f"cancelled in time: {undone}")
    return OperationError(
        errors_pb2.ERROR_REASON_EXPIRED, f"its timeout passed before its point of no return: {undone}"
    )


def _why_too_late(entry: _Entry) -> str | None:
    """What to say of a cancellation or timeout that came after the point of no return."""
    if entry.cancel_requested:
        return "the cancellation came after the point of no return, so it was finished"
    if trio.current_time() > entry.scope.deadline:
        return "its timeout passed after the point of no return, so it was finished"
    return None
