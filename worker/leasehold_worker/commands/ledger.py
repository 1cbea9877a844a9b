"""The life of one worker's commands, as values: frames come in, effects come out.

The ledger never waits, reads no clock and writes no disk. Effects must be applied in order. Effects after a
:class:`Keep` wait until its entry is on disk. So a command that was reported accepted is never forgotten, and
a reported outcome never changes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, TypeAlias, final

from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandSpec, CommandUpdate

from leasehold_worker.commands.states import ACCEPTED, CANCELLED, REJECTED, RUNNING, TRANSITIONS, is_terminal
from leasehold_worker.errors import OperationError
from leasehold_worker.secret_values import without_secrets

UNFINISHED_LIMIT: Final = 8
"""Commands that may be unfinished at once."""

UNACKNOWLEDGED_LIMIT: Final = 1024
"""Outcomes that may wait for their acknowledgement. More means a coordinator that never stores them."""

REFUSED_LIMIT: Final = 1024
"""Refusals that are remembered, in memory only: a duplicate is refused again. The oldest go first."""

RETENTION_S: Final = 86_400.0
"""Time for which an acknowledged command is remembered, so that a late duplicate finds its answer."""

ACKNOWLEDGED_LIMIT: Final = 4096
"""Acknowledged commands that are remembered; the oldest go first."""

FORGET_AT_ONCE: Final = 64

LOCAL_PREFIX: Final = "local-"
"""Prefix of the ids of the worker's own commands. The coordinator knows nothing of them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An accepted command.

    Attributes:
        command: The command as it arrived.
        epoch: Epoch of its session.
        received_s: Time of arrival in seconds of the wall clock, which is valid across restarts.
        update: Its last update.
        cancel_requested: Its cancellation was requested.
        acknowledged_s: Time of the coordinator's acknowledgement. None: there is none.
    """

    command: CommandSpec
    epoch: int
    received_s: float
    update: CommandUpdate
    cancel_requested: bool = False
    acknowledged_s: float | None = None

    @property
    def command_id(self) -> str:
        """The command's id."""
        return self.command.command_id

    @property
    def state(self) -> CommandState.ValueType:
        """The command's state."""
        return self.update.state

    @property
    def is_open(self) -> bool:
        """Whether the command has not ended."""
        return not is_terminal(self.state)


@dataclass(frozen=True, slots=True)
class Keep:
    """Store the entry on disk."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Tell:
    """Send the update to the coordinator, if there is a session."""

    update: CommandUpdate


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send the refusal to the coordinator at once: nothing was done, so nothing needs to be on disk."""

    update: CommandUpdate


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the operation."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Cancel:
    """Undo the operation if that is still possible."""

    command_id: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove the entries from the disk."""

    command_ids: tuple[str, ...]


Effect: TypeAlias = Keep | Tell | Refuse | Start | Cancel | Forget


@final
class CommandLedger:
    """The commands of one worker.

    Args:
        entries: The entries that an earlier run of the worker stored.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._open: dict[str, Entry] = {}
        self._ended: dict[str, Entry] = {}
        self._acknowledged: dict[str, Entry] = {}
        self._refused: dict[str, CommandUpdate] = {}
        for entry in sorted(entries, key=lambda entry: entry.acknowledged_s or 0.0):
            self._put(entry)

    @property
    def open_entries(self) -> list[Entry]:
        """Commands that have not ended."""
        return list(self._open.values())

    @property
    def unacknowledged(self) -> list[CommandUpdate]:
        """Outcomes that the coordinator has not acknowledged."""
        return [entry.update for entry in self._ended.values()]

    def _find(self, command_id: str) -> Entry | None:
        for entries in (self._open, self._ended, self._acknowledged):
            if command_id in entries:
                return entries[command_id]
        return None

    def _put(self, entry: Entry) -> Entry:
        """Puts an entry where its state belongs: a command goes from open to ended to acknowledged."""
        if entry.is_open:
            self._open[entry.command_id] = entry
        elif entry.acknowledged_s is None:
            self._open.pop(entry.command_id, None)
            self._ended[entry.command_id] = entry
        else:
            self._ended.pop(entry.command_id, None)
            self._acknowledged[entry.command_id] = entry
        return entry

    def receive(
        self, frame: CommandFrame, epoch: int, now_s: float, refusal: OperationError | None = None
    ) -> list[Effect]:
        """Accepts a command or its cancellation. A known command is answered with its current state.

        Args:
            frame: The frame.
            epoch: The highest epoch that this worker has seen. A frame with another epoch is ignored if its
                command is known, and else refused: a refusal of a running command would count as its outcome.
            now_s: Seconds of the wall clock.
            refusal: Why no new command is accepted. None: it is.
        """
        command_id = frame.command.command_id
        is_stale = frame.epoch != epoch
        entry = self._find(command_id)
        if entry is not None:
            if frame.cancel and not is_stale and entry.is_open and not entry.cancel_requested:
                cancelled = self._put(replace(entry, cancel_requested=True))
                return [Keep(cancelled), Cancel(command_id)]
            return [Tell(entry.update)]
        if command_id in self._refused:
            return [Refuse(self._refused[command_id])]
        if is_stale:
            return [Refuse(rejection(command_id, _stale(frame.epoch, epoch)))]
        if frame.ask:
            return [Refuse(rejection(command_id, _UNKNOWN))]
        return self._take_in(frame, now_s, refusal)

    def _take_in(self, frame: CommandFrame, now_s: float, refusal: OperationError | None) -> list[Effect]:
        command = frame.command
        refusal = refusal or self._why_not(command)
        if frame.cancel:
            update = _cancelled(command.command_id)
        elif refusal is not None:
            update = rejection(command.command_id, refusal)
        else:
            update = CommandUpdate(command_id=command.command_id, state=ACCEPTED)
            entry = self._put(Entry(command, frame.epoch, now_s, update))
            return [Keep(entry), Tell(update), Start(entry)]
        return self._remember_refusal(update)

    def _remember_refusal(self, update: CommandUpdate) -> list[Effect]:
        if is_local(update.command_id):  # it has no duplicates
            return [Refuse(update)]
        if len(self._refused) >= REFUSED_LIMIT:
            del self._refused[next(iter(self._refused))]
        self._refused[update.command_id] = update
        return [Refuse(update)]

    def _why_not(self, command: CommandSpec) -> OperationError | None:
        for workload_id in workload_ids(command):
            if any(workload_id in workload_ids(entry.command) for entry in self._open.values()):
                return OperationError(
                    errors_pb2.ERROR_REASON_WORKLOAD_BUSY,
                    f"workload {workload_id} has an unfinished command: wait for it, or cancel it",
                )
        theirs = sum(not is_local(command_id) for command_id in self._open)
        if theirs >= UNFINISHED_LIMIT and not is_local(command.command_id):
            return OperationError(
                errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
                f"the worker has {UNFINISHED_LIMIT} unfinished commands, which is its limit: try again later",
            )
        unacknowledged = sum(not is_local(command_id) for command_id in self._ended)
        if unacknowledged >= UNACKNOWLEDGED_LIMIT and not is_local(command.command_id):
            return OperationError(
                errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
                f"{UNACKNOWLEDGED_LIMIT} outcomes wait to be stored by the coordinator: check its store",
            )
        return None

    def refuse(self, command_id: str, error: OperationError) -> list[Effect]:
        """Takes back a command that could not be stored. It was neither reported accepted nor begun."""
        self._open.pop(command_id, None)
        return self._remember_refusal(rejection(command_id, error))

    def progress(self, command_id: str, phase: str) -> list[Effect]:
        """Records the phase of an operation. The phase is not stored: after a restart it is observed."""
        return [Tell(self._change(command_id, _running(command_id, phase)).update)]

    def finish(self, outcome: CommandUpdate) -> list[Effect]:
        """Ends a command.

        Raises:
            ValueError: The outcome can't follow the command's state.
        """
        return [Keep(self._change(outcome.command_id, outcome)), Tell(outcome)]

    def _change(self, command_id: str, update: CommandUpdate) -> Entry:
        entry = self._find(command_id)
        if entry is None:
            raise ValueError(f"no command {command_id}")
        if update.state not in TRANSITIONS.get(entry.state, ()):
            states = f"{CommandState.Name(entry.state)} to {CommandState.Name(update.state)}"
            raise ValueError(f"invalid transition of a command: {states}")
        command = without_secrets(entry.command) if is_terminal(update.state) else entry.command
        return self._put(replace(entry, command=command, update=update))

    def acknowledge(self, command_id: str, now_s: float) -> list[Effect]:
        """Records that the coordinator has stored the outcome, and drops old commands.

        A command of the worker itself is dropped at once. Its id is never sent again, and the memory is for
        duplicates of the coordinator's commands: users of the host could fill it with releases.
        """
        entry = self._ended.get(command_id)
        if entry is None:
            return []
        if is_local(command_id):
            del self._ended[command_id]
            return [Forget((command_id,))]
        return [Keep(self._put(replace(entry, acknowledged_s=now_s))), *self._forget_old(now_s)]

    def forget_local(self) -> list[Effect]:
        """Drops ended commands of the worker itself, at a start: their callers ended with the last run."""
        forgotten: list[str] = []
        for entries in (self._ended, self._acknowledged):
            for command_id in filter(is_local, tuple(entries)):
                del entries[command_id]
                forgotten.append(command_id)
        return [Forget(tuple(forgotten))] if forgotten else []

    def _forget_old(self, now_s: float) -> list[Effect]:
        forgotten: list[str] = []
        surplus = len(self._acknowledged) - ACKNOWLEDGED_LIMIT
        for entry in list(islice(self._acknowledged.values(), max(surplus, FORGET_AT_ONCE))):
            old = entry.acknowledged_s is not None and entry.acknowledged_s < now_s - RETENTION_S
            if not old and len(forgotten) >= surplus:
                break
            del self._acknowledged[entry.command_id]
            forgotten.append(entry.command_id)
        return [Forget(tuple(forgotten))] if forgotten else []


def is_local(command_id: str) -> bool:
    """Whether the command is one of the worker itself."""
    return command_id.startswith(LOCAL_PREFIX)


def workload_ids(command: CommandSpec) -> Sequence[str]:
    """The workloads of a command. Empty: it is about the worker or its GPUs."""
    if command.operation.HasField("remap"):
        return [move.workload_id for move in command.operation.remap.moves]
    return [command.workload_id] if command.workload_id else []


def preempted_by(command: CommandSpec) -> Sequence[str]:
    """The ids of the workloads that a run or a restore suspends first. Empty: none."""
    return [*command.operation.run.preempt, *command.operation.restore.preempt]


def rejection(command_id: str, error: OperationError) -> CommandUpdate:
    """The update that rejects a command."""
    return CommandUpdate(command_id=command_id, state=REJECTED, error=error.to_proto())


def _cancelled(command_id: str) -> CommandUpdate:
    error = OperationError(errors_pb2.ERROR_REASON_CANCELLED, "cancelled before it was accepted")
    return CommandUpdate(command_id=command_id, state=CANCELLED, error=error.to_proto())


def _running(command_id: str, phase: str) -> CommandUpdate:
    return CommandUpdate(command_id=command_id, state=RUNNING, phase=phase)


_UNKNOWN: Final = OperationError(
    errors_pb2.ERROR_REASON_UNKNOWN_COMMAND, "the command is not in the worker's journal"
)


def _stale(epoch: int, highest: int) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_STALE_EPOCH,
        f"the command has epoch {epoch}, and this session has {highest}",
    )
