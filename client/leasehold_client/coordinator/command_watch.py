"""Waiting for the end of a command, and when to stop waiting."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import grpc
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import Command, CommandState

from leasehold_client.coordinator.retry import resume
from leasehold_client.errors import NoCoordinatorError, StillOpenError

OUT_OF_CONTACT_LIMIT_S: Final = 30.0
"""How long beyond its own timeout a command may be UNKNOWN before nobody waits for it any more."""

ENDED: Final = frozenset(
    {
        command_pb2.COMMAND_STATE_SUCCEEDED,
        command_pb2.COMMAND_STATE_FAILED,
        command_pb2.COMMAND_STATE_REJECTED,
        command_pb2.COMMAND_STATE_CANCELLED,
        command_pb2.COMMAND_STATE_EXPIRED,
    }
)

OpenStream: TypeAlias = Callable[[float | None], Generator[Command]]
"""Opens a watch, which ends with DEADLINE_EXCEEDED after so many seconds. None: never by time."""


def has_ended(state: CommandState.ValueType) -> bool:
    """Whether a command in this state has ended."""
    return state in ENDED


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """Whether and how long somebody who asked for a command waits for its end.

    Attributes:
        wanted: False returns at once.
        limit_s: How long. None: until it has been UNKNOWN for 30 s beyond its own timeout.
    """

    wanted: bool
    limit_s: float | None


@final
class Patience:
    """How long one command is waited for. Times are seconds of the monotonic clock.

    Args:
        command: As it was when the waiting began.
        limit_s: How long in all. None: until it has been UNKNOWN for 30 s beyond its own timeout.
    """

    def __init__(self, command: Command, limit_s: float | None = None) -> None:
        self._command = command
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._unknown_since: float | None = None
        self.saw(command)

    def saw(self, command: Command) -> None:
        """Takes in how the command stands, unless that is older than what is known."""
        if command.revision < self._command.revision:
            return
        self._command = command
        if command.state != command_pb2.COMMAND_STATE_UNKNOWN:
            self._unknown_since = None
        elif self._unknown_since is None:
            self._unknown_since = time.monotonic()

    @property
    def deadline(self) -> float | None:
        """When the waiting ends, as the command stands now. None: not by time."""
        if self._limit_s is not None:
            return self._began + self._limit_s
        if self._unknown_since is None:
            return None
        own_end = self._began + self._command.timeout.ToNanoseconds() / 1e9
        return max(own_end, self._unknown_since) + OUT_OF_CONTACT_LIMIT_S

    def left_s(self) -> float | None:
        """What is left.

        Raises:
            StillOpenError: Nothing.
        """
        if self.deadline is None:
            return None
        left_s = self.deadline - time.monotonic()
        if left_s > 0:
            return left_s
        why = "has not ended in the time that it was waited for"
        if self._unknown_since is not None:
            why = "can't be known to have ended: its worker is out of contact"
        raise StillOpenError(
            f"command {self._command.command_id} {why}; it goes on, and "
            f"`leasehold get commands {self._command.command_id}` shows how it stands",
            self._command,
        )


def watch_command(open_stream: OpenStream, patience: Patience | None) -> Iterator[Command]:
    """The command as it is, and each time that it changes, until it has ended.

    A coordinator that goes away is waited for, for 30 s each time. So is one that ends each watch early
    without news: what was told before does not count as an answer.

    Args:
        open_stream: Opens a watch of it.
        patience: How long it is waited for. None: until it has ended.

    Raises:
        NoCoordinatorError: The coordinator did not come back.
        StillOpenError: The patience is over.
    """
    revision = -1

    def attempt() -> Iterator[Command]:
        nonlocal revision
        for current in open_stream(None) if patience is None else _patiently(open_stream, patience):
            if current.revision > revision or has_ended(current.state):
                revision = current.revision
                yield current

    for current in resume(attempt):
        yield current
        if has_ended(current.state):
            return


def _patiently(open_stream: OpenStream, patience: Patience) -> Iterator[Command]:
    """Opens the watch anew each time that the deadline is another, since that of a call is fixed.

    Raises:
        NoCoordinatorError: The watch ended before the deadline.
        StillOpenError: The patience is over.
    """
    while True:
        deadline = patience.deadline
        try:
            with closing(open_stream(patience.left_s())) as stream:
                for current in stream:
                    patience.saw(current)
                    yield current
                    if patience.deadline != deadline:
                        break
        except NoCoordinatorError as error:
            if error.code == grpc.StatusCode.DEADLINE_EXCEEDED:
                patience.left_s()
            raise  # the deadline was not ours
