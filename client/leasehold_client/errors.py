"""What a coordinator refuses, as Python errors."""

from typing import cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class LeaseholdError(Exception):
    """The coordinator refused a request.

    Attributes:
        reason: Name of the ErrorReason without its prefix, such as ``UNKNOWN_WORKLOAD``; empty where the
            server sent none.
        message: One sentence for a person.
        metadata: Facts for programs.
    """

    def __init__(self, message: str, reason: str = "", metadata: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}


class NoCoordinatorError(LeaseholdError):
    """There is no coordinator at the address, or it went away."""


class UsageError(LeaseholdError):
    """What was asked for can't be asked."""


def decode_error(error: grpc.RpcError, address: str) -> LeaseholdError:
    """The typed form of what a call raised."""
    call = cast("grpc.Call", error)  # every error of a stub is its call too
    if call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return NoCoordinatorError(
            f"no coordinator answers at {address} ({call.details()}): start one with "
            "`leasehold coordinator`, or name another with --coordinator or LEASEHOLD_COORDINATOR"
        )
    message = call.details() or call.code().name
    status = rpc_status.from_call(call)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return LeaseholdError(message, info.reason, dict(info.metadata))
    return LeaseholdError(message, call.code().name)
