"""Watches one command until it has ended, or until a deadline."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, TypeAlias, final

import grpc
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import Command, CommandState

from leasehold_client.aio.retry import resume
from leasehold_client.errors import CommandWaitTimeoutError, NoCoordinatorError

OUT_OF_CONTACT_LIMIT_S: Final = 30.0
"""How long beyond the command's own timeout the watch of an UNKNOWN command lasts."""

ENDED: Final = frozenset(
    {
        command_pb2.COMMAND_STATE_SUCCEEDED,
        command_pb2.COMMAND_STATE_FAILED,
        command_pb2.COMMAND_STATE_REJECTED,
        command_pb2.COMMAND_STATE_CANCELLED,
        command_pb2.COMMAND_STATE_EXPIRED,
    }
)

FIRST_LOOK_S: Final = 1.0
"""Time for the first state of a command if the wait has none."""

OpenStream: TypeAlias = Callable[[float | None], AsyncGenerator[Command]]
"""Opens a watch that ends with DEADLINE_EXCEEDED after so many seconds. None: no deadline."""


def has_ended(state: CommandState.ValueType) -> bool:
    """Whether a command in this state has ended."""
    return state in ENDED


@final
class CommandDeadline:
    """When the wait for one command ends, in seconds of the monotonic clock.

    Args:
        command: The command at the beginning of the wait.
        limit_s: Longest wait. None: until the command has been UNKNOWN for 30 s beyond its own timeout.
    """

    def __init__(self, command: Command, limit_s: float | None = None) -> None:
        self._command = command
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._unknown_since: float | None = None
        self.update(command)
        self._has_looked = False

    def update(self, command: Command) -> None:
        """Takes a newer state of the command into account."""
        if command.revision < self._command.revision:
            return
        self._command = command
        if command.state != command_pb2.COMMAND_STATE_UNKNOWN:
            self._unknown_since = None
        elif self._unknown_since is None:
            self._unknown_since = time.monotonic()

    @property
    def time(self) -> float | None:
        """End of the wait in the command's current state. None: no end."""
        if self._limit_s is not None:
            return self._began + self._limit_s
        if self._unknown_since is None:
            return None
        own_end = self._began + self._command.timeout.ToNanoseconds() / 1e9
        return max(own_end, self._unknown_since) + OUT_OF_CONTACT_LIMIT_S

    @property
    def is_over(self) -> bool:
        """Whether the wait is over."""
        return self.time is not None and self.time <= time.monotonic()

    def look_s(self) -> float | None:
        """As :meth:`left_s`, but a wait without any time looks once.

        Raises:
            CommandWaitTimeoutError: The wait is over.
        """
        is_first, self._has_looked = not self._has_looked, True
        return FIRST_LOOK_S if is_first and self.is_over else self.left_s()

    def left_s(self) -> float | None:
        """Seconds until the wait ends. None: no end.

        Raises:
            CommandWaitTimeoutError: The wait is over.
        """
        if self.time is None:
            return None
        left_s = self.time - time.monotonic()
        if left_s > 0:
            return left_s
        command_id = self._command.command_id
        why = "the wait timed out" if self._unknown_since is None else "its worker is out of contact"
        raise CommandWaitTimeoutError(
            f"command {command_id} has not ended: {why}; it continues, and "
            f"`leasehold get commands {command_id}` shows its state",
            self._command,
        )


async def watch_command(open_stream: OpenStream, deadline: CommandDeadline) -> AsyncGenerator[Command]:
    """Yields the command now and after each change, until it has ended.

    An outage of the coordinator is tolerated for 30 s. A coordinator that ends each watch without a new
    revision counts as an outage.

    Args:
        open_stream: Opens a watch of the command.
        deadline: When the wait ends.

    Raises:
        NoCoordinatorError: The outage lasted longer.
        CommandWaitTimeoutError: The wait is over.
    """
    revision = -1

    async def attempt() -> AsyncGenerator[Command]:
        nonlocal revision
        async with aclosing(_watch_until(open_stream, deadline)) as states:
            async for current in states:
                if current.revision > revision or has_ended(current.state):
                    revision = current.revision
                    yield current

    async with aclosing(resume(attempt, is_patient=True)) as states:
        async for current in states:
            yield current
            if has_ended(current.state):
                return


async def _watch_until(open_stream: OpenStream, deadline: CommandDeadline) -> AsyncGenerator[Command]:
    """Reopens the watch each time that the deadline changes, since the deadline of a call is fixed.

    Raises:
        NoCoordinatorError: The watch ended before the deadline.
        CommandWaitTimeoutError: The wait is over.
    """
    while True:
        end = deadline.time
        try:
            async with aclosing(open_stream(deadline.look_s())) as stream:
                async for current in stream:
                    deadline.update(current)
                    yield current
                    if deadline.time != end or deadline.is_over:
                        break
        except NoCoordinatorError as error:
            if error.code == grpc.StatusCode.DEADLINE_EXCEEDED:
                deadline.left_s()
            raise  # the call ended before its deadline
