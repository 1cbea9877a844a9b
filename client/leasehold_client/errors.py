"""What a coordinator refuses, as Python errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:  # `leasehold --help` needs no gRPC
    import grpc
    from leasehold.v1.command_pb2 import Command

DOMAIN: Final = "leasehold"


class LeaseholdError(Exception):
    """A request was refused, or could not be made.

    Attributes:
        reason: Name of the ErrorReason without its prefix, such as ``UNKNOWN_WORKLOAD``; empty where the
            server sent none.
        message: One sentence for a person.
        metadata: Facts for programs.
        code: The call's status. None: no call was made.
        retry_after_s: When the same request may be served. None: it is refused for good.
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


class NoCoordinatorError(LeaseholdError):
    """There is no coordinator at the address, or it went away."""


class StillOpenError(LeaseholdError):
    """A command was waited for, and has not ended. It goes on.

    Attributes:
        command: As it was last seen.
    """

    def __init__(self, message: str, command: Command) -> None:
        super().__init__(message)
        self.command = command


class NotYetError(LeaseholdError):
    """A workload was waited for as long as asked, and is not as it was to be. It goes on."""


class UsageError(LeaseholdError):
    """What was asked for can't be asked."""


def decode_error(error: grpc.RpcError, address: str) -> LeaseholdError:
    """The typed form of what a call to the coordinator at the address raised.

    A refusal that carries a reason is a refusal, whatever its status: only a call that nobody answered
    means that there is no coordinator.
    """
    from grpc import StatusCode

    refusal = decode_refusal(error)
    if refusal is not None:
        return refusal
    call = cast("grpc.Call", error)
    code, details = call.code(), call.details() or ""
    if code in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
        return NoCoordinatorError(
            f"no coordinator answers at {address} ({details}): start one with "
            "`leasehold coordinator`, or name another with --coordinator or LEASEHOLD_COORDINATOR",
            code=code,
        )
    return LeaseholdError(
        f"{address} answered {code.name} ({details}): check that a coordinator of this version serves there",
        code=code,
    )


def decode_refusal(error: grpc.RpcError) -> LeaseholdError | None:
    """What a call was refused with. None: it was not refused with a reason."""
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    call = cast("grpc.Call", error)  # every error of a stub is its call too
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status is not None else ():
            detail.Unpack(info) or detail.Unpack(retry)
        delay_s = retry.retry_delay.ToTimedelta().total_seconds()
    except (ValueError, OverflowError, DecodeError):
        return None  # details that contradict the status, or are none: the status speaks for itself
    if info.domain != DOMAIN:
        return None
    retry_after_s = delay_s if retry.HasField("retry_delay") and delay_s >= 0 else None
    return LeaseholdError(call.details() or "", info.reason, dict(info.metadata), call.code(), retry_after_s)
