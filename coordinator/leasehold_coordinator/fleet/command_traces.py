"""The trace contexts of unfinished commands: from the client's call to the worker's operation."""

from contextvars import ContextVar
from typing import Final, final

from leasehold.v1.command_pb2 import Command

from leasehold_coordinator import tracing
from leasehold_coordinator.core.command_states import SUCCEEDED
from leasehold_coordinator.fleet.command_ends import outcome_name, reason_name, verb_of

COMMAND_LIMIT: Final = 10_000
"""Commands whose trace contexts are kept. The oldest are dropped, and their workers begin new traces."""

_PARENT: Final[ContextVar[str]] = ContextVar("trace_parent", default="")
"""The trace context of the call that the current task serves."""


def note_trace(trace_parent: str) -> None:
    """Sets the trace context of the current task, and of tasks that it starts later."""
    _PARENT.set(trace_parent)


@final
class CommandTraces:
    """The commands that belong to a trace. A restart of the coordinator forgets them."""

    def __init__(self) -> None:
        self._commands: dict[str, tuple[str, tracing.Span | None]] = {}
        """By command id: the trace context for its worker, and the command's span if spans are exported."""

    def begin(self, command: Command) -> None:
        """Begins the span of a command that the current task creates."""
        parent = _PARENT.get()
        span = tracing.begin(
            f"command {verb_of(command)}",
            parent,
            command=command.command_id,
            workload=command.workload_id,
            worker=command.worker_id,
        )
        if span is not None or parent:
            self._commands[command.command_id] = (span.trace_parent if span is not None else parent, span)
        if len(self._commands) > COMMAND_LIMIT:
            self._end(next(iter(self._commands)), "dropped")

    def of(self, command_id: str) -> str:
        """The trace context for the worker of a command. Empty: the command belongs to no trace."""
        return self._commands.get(command_id, ("", None))[0]

    def end(self, command: Command) -> None:
        """Ends the span of a command whose outcome is stored."""
        error = ""
        if command.state != SUCCEEDED:
            error = reason_name(command.error) if command.HasField("error") else outcome_name(command.state)
        self._end(command.command_id, error)

    def drop(self, command: Command) -> None:
        """Ends the span of a command that could not be stored."""
        self._end(command.command_id, "STORAGE_UNAVAILABLE")

    def _end(self, command_id: str, error: str) -> None:
        _, span = self._commands.pop(command_id, ("", None))
        if span is not None:
            span.end(error)
