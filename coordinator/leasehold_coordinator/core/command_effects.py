"""Effects of the command ledger: store, note, send and acknowledge."""

from dataclasses import dataclass
from typing import Final, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandSpec

from leasehold_coordinator.errors import FleetError

LEAST_TIMEOUT_NS: Final = 1_000_000
"""The timeout sent with an overdue command. Zero would mean no limit."""


@dataclass(frozen=True, slots=True)
class StoredCommand:
    """A command, with facts that the coordinator stores and does not show.

    Attributes:
        command: The command as clients see it.
        instance_id: The worker's instance that the command was last sent to. Empty: not sent yet.
        accepted: The worker has reported that it has the command.
        cancel_requested: A client has asked to cancel the command.
        jumped_ns: :attr:`CommandLedger.jumped_ns` at the creation of the command.
        request_digest: Digest of the request that created the command. Empty: the request had no id.
    """

    command: Command
    instance_id: str = ""
    accepted: bool = False
    cancel_requested: bool = False
    jumped_ns: int = 0
    request_digest: bytes = b""

    def busy_error(self) -> FleetError:
        """WORKLOAD_BUSY, which refuses what can't be done beside this unfinished command."""
        command_id = self.command.command_id
        if self.cancel_requested:
            way = ", and its cancellation is requested: wait for its end"
        else:
            way = f": wait for it, or `leasehold cancel {command_id}`"
        return FleetError(
            errors_pb2.ERROR_REASON_WORKLOAD_BUSY,
            f"command {command_id} has not ended{way}",
            command_id=command_id,
        )


@dataclass(frozen=True, slots=True)
class Store:
    """Store the command, and publish it to watchers."""

    after: StoredCommand


@dataclass(frozen=True, slots=True)
class Note:
    """Store the command soon, in one write with others, and then publish it to watchers.

    A step towards the outcome may wait. A crash before the write loses nothing: the worker's next hello names
    the command, the coordinator sends it again, and the worker answers with its state.
    """

    after: StoredCommand


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to its worker. ``cancel`` asks to cancel the command, and ``ask`` asks for its state."""

    stored: StoredCommand
    cancel: bool = False
    ask: bool = False


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the worker that the coordinator has stored the outcome."""

    worker_id: str
    command_id: str


Effect: TypeAlias = Store | Note | Send | Acknowledge


def frame_of(sent: Send, epoch: int, now: Timestamp, jumped_ns: int = 0) -> CommandFrame:
    """The frame for a worker. Its timeout is the remaining time, since the worker counts from the frame on.

    Args:
        sent: The command to send.
        epoch: The epoch of the session.
        now: The current time.
        jumped_ns: Clock jumps since the coordinator started, in total.
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


def is_overdue(stored: StoredCommand, now: Timestamp, jumped_ns: int) -> bool:
    """Whether the timeout of a command is over. A command without a timeout never is."""
    return 0 < stored.command.timeout.ToNanoseconds() < _age_ns(stored, now, jumped_ns)
