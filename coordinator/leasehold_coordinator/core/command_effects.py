"""Effects of the command ledger: to store, to note, to send and to acknowledge."""

from dataclasses import dataclass
from typing import Final, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.command_pb2 import Command
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandSpec

LEAST_TIMEOUT_NS: Final = 1_000_000
"""What is sent of a timeout that is over: none at all would mean that there is no limit."""


@dataclass(frozen=True, slots=True)
class StoredCommand:
    """A command, and what the coordinator must remember beside it.

    Attributes:
        command: As clients see it.
        instance_id: The instance of the worker that it was last sent to; '' before.
        accepted: The worker has said that it has the command.
        cancel_requested: Somebody asked to cancel it.
        jumped_ns: By how much the clock had jumped when it was created: see :attr:`CommandLedger.jumped_ns`.
    """

    command: Command
    instance_id: str = ""
    accepted: bool = False
    cancel_requested: bool = False
    jumped_ns: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    """Put the command on disk, and tell those who watch it."""

    after: StoredCommand


@dataclass(frozen=True, slots=True)
class Note:
    """Put the command on disk soon, together with others, and then tell those who watch it.

    Nothing waits for a step towards the outcome. A crash before that loses nothing, since the worker's next
    hello names the command, which is then sent again and answered with where it stands.
    """

    after: StoredCommand


@dataclass(frozen=True, slots=True)
class Send:
    """Send the command to its worker, or its cancellation, or only the question how it stands."""

    stored: StoredCommand
    cancel: bool = False
    ask: bool = False


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the worker that the outcome is on disk."""

    worker_id: str
    command_id: str


Effect: TypeAlias = Store | Note | Send | Acknowledge


def frame_of(sent: Send, epoch: int, now: Timestamp, jumped_ns: int = 0) -> CommandFrame:
    """The command as it goes down. Its timeout is what is left of it, since the worker counts anew.

    Args:
        sent: The command.
        epoch: Of the session.
        now: The time.
        jumped_ns: By how much its clock has jumped since the start.
    """
    stored = sent.stored
    command = stored.command
    spec = CommandSpec(
        command_id=command.command_id,
        workload_id=command.workload_id,
        expected_generation=command.expected_generation if command.HasField("expected_generation") else None,
        timeout=command.timeout if command.HasField("timeout") else None,
        operation=command.operation,
    )
    frame = CommandFrame(epoch=epoch, command=spec, cancel=sent.cancel, ask=sent.ask)
    timeout_ns = command.timeout.ToNanoseconds()
    if timeout_ns > 0:
        left_ns = timeout_ns - _age_ns(stored, now, jumped_ns)
        frame.command.timeout.FromNanoseconds(min(timeout_ns, max(LEAST_TIMEOUT_NS, left_ns)))
    return frame


def _age_ns(stored: StoredCommand, now: Timestamp, jumped_ns: int) -> int:
    passed_ns: int = now.ToNanoseconds() - stored.command.create_time.ToNanoseconds()
    return passed_ns - (jumped_ns - stored.jumped_ns)
