"""Errors of the client, and how gRPC errors become them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, cast

from leasehold_client.remedies import REMEDIES

if TYPE_CHECKING:  # `leasehold --help` needs no gRPC
    import grpc
    from leasehold.v1.command_pb2 import Command

DOMAIN: Final = "leasehold.dev"

NO_CONNECTION: Final = "failed to connect to all addresses"
"""How gRPC's texts about failed connections begin."""

_TOO_LARGE: Final = re.compile(r"SERVER: Received message larger than max \((\d+) vs\. (\d+)\)")
"""gRPC's text about a request that exceeds the limit of the coordinator."""

_START: Final = (
    "start one with `leasehold coordinator`, or name another one with --coordinator or LEASEHOLD_COORDINATOR"
)
_LOOK: Final = "look at its process and its log"
_CORRECT: Final = "correct the address"
_NETWORK: Final = "check the network, or correct the address"
_CONNECTION_PROBLEMS: Final = {
    "Connection refused": ("connection refused", _START),
    "before receiving SETTINGS frame": ("a program listens there, and does not respond", _LOOK),
    "Handshake read failed (Endpoint closing)": ("a program listens there, and does not respond", _LOOK),
    "Deadline Exceeded": ("it did not respond in time", _LOOK),
    "Failed parsing HTTP/2": ("a program that is no coordinator listens there", _CORRECT),
    "Domain name not found": ("no host has this name", _CORRECT),
    "Network is unreachable": ("the network is unreachable", _NETWORK),
    "No route to host": ("no route to host", _NETWORK),
    "Connection timed out": ("its host does not respond", _NETWORK),
    "Socket closed": ("it ended the connection", _LOOK),
    "Connection reset by peer": ("it ended the connection", _LOOK),
    "GOAWAY received": ("it ended the connection", _LOOK),
    "FD Shutdown": ("the connection broke", _LOOK),
    "Timeout while contacting DNS servers": ("the name can't be looked up", _NETWORK),
    "No such file or directory": ("its socket does not exist", _START),
}
"""The problem and its remedy, by a part of gRPC's text."""


class LeaseholdError(Exception):
    """A request was refused or could not be made.

    Attributes:
        reason: Name of the ErrorReason without its prefix, such as ``UNKNOWN_WORKLOAD``. Empty: no reason
            was sent.
        message: One sentence for people.
        metadata: Details for programs.
        code: Status of the gRPC call. None: no call was made.
        retry_after_s: Delay after which a repeated request may succeed. None: a repeated request fails too.
    """

    def __init__(
        self,
        message: str,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        code: grpc.StatusCode | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}
        self.code = code

    @property
    def remedy(self) -> str:
        """The remedy of the reason, as in docs/errors.md. The message may be more specific.

        Empty: there is nothing to do, or the reason is unknown to this version.
        """
        return REMEDIES.get(self.reason, "")


class NoCoordinatorError(LeaseholdError):
    """No coordinator answers at the address, or the connection to the coordinator broke.

    Attributes:
        is_sent: Whether the request, or an earlier attempt of it, may have reached a coordinator.
    """

    def __init__(self, message: str, code: grpc.StatusCode | None = None, *, is_sent: bool = True) -> None:
        super().__init__(message, code=code)
        self.is_sent = is_sent


class WaitTimeoutError(LeaseholdError):
    """A wait timed out. The command or workload continues."""


class CommandWaitTimeoutError(WaitTimeoutError):
    """The wait for a command timed out, or its worker is out of contact. The command continues.

    Attributes:
        command: The last known state of the command.
    """

    def __init__(self, message: str, command: Command) -> None:
        super().__init__(message)
        self.command = command


class CommandFailedError(LeaseholdError):
    """A command ended without success: FAILED, REJECTED, CANCELLED or EXPIRED.

    Attributes:
        command: The command, whose ``error`` and ``result`` have the details.
    """

    def __init__(self, message: str, reason: str, command: Command) -> None:
        super().__init__(message, reason, dict(command.error.metadata))
        self.command = command


class RenewalDueError(LeaseholdError):
    """A stream has ended so that its certificate can be renewed. The client opens the stream again."""


class OutputError(LeaseholdError):
    """Standard output is closed or can't be written, such as on a full disk."""


class UsageError(LeaseholdError):
    """An argument is invalid, or arguments contradict each other."""


def decode_error(error: grpc.RpcError, address: str, no_answer_remedy: str = "") -> LeaseholdError:
    """Converts the error of a call to the coordinator at ``address``.

    An error with a reason is a refusal, whatever its status. An error without a reason whose status is
    UNAVAILABLE or DEADLINE_EXCEEDED means that no coordinator answers.

    Args:
        error: The error.
        address: The address of the call.
        no_answer_remedy: What to do if no coordinator answers. Empty: the remedy of the cause.
    """
    from grpc import StatusCode

    refusal = decode_refusal(error)
    if refusal is not None:
        return refusal
    call = cast("grpc.Call", error)
    code, details = call.code(), call.details() or ""
    if code in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
        problem = (details.partition("last error: ")[2] or details, _START)
        for text, known in _CONNECTION_PROBLEMS.items():
            problem = known if text in details else problem
        what, remedy = problem
        return NoCoordinatorError(
            f"no coordinator answers at {address} ({what}): {no_answer_remedy or remedy}",
            code=code,
            is_sent=not details.startswith(NO_CONNECTION),
        )
    if code is StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(details)):
        return LeaseholdError(
            f"the request has {sizes[1]} bytes, and {address} takes at most {sizes[2]}: shorten its values, "
            "such as arguments and variables of a program, or put them into a file of the worker's host",
            code=code,
        )
    remedy = "check that a coordinator of this version listens there for clients"
    if code is StatusCode.UNIMPLEMENTED:
        remedy = (
            "give the address that the coordinator serves clients at (--listen), not the one for workers "
            "(--worker-listen); or a coordinator of this version, if that one is older"
        )
    return LeaseholdError(f"{address} answered {code.name} ({details}): {remedy}", code=code)


def decode_refusal(error: grpc.RpcError) -> LeaseholdError | None:
    """Converts an error with a Leasehold reason. Returns None for any other error."""
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    call = cast("grpc.Call", error)  # an error of a gRPC stub is also its call
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status is not None else ():
            detail.Unpack(info) or detail.Unpack(retry)
        delay_s = retry.retry_delay.ToTimedelta().total_seconds()
    except (ValueError, OverflowError, DecodeError):
        return None  # malformed details: only the status counts
    if info.domain != DOMAIN:
        return None
    retry_after_s = delay_s if retry.HasField("retry_delay") and delay_s >= 0 else None
    return LeaseholdError(call.details() or "", info.reason, dict(info.metadata), call.code(), retry_after_s)
