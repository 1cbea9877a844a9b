"""What the coordinator refuses, as google.rpc.Status on unary calls and as Error in frames."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason

DOMAIN: Final = "leasehold"

_CODES: Final[dict[ErrorReason.ValueType, grpc.StatusCode]] = {
    errors_pb2.ERROR_REASON_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_DUPLICATE_GPU: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_INVALID_TOKEN: grpc.StatusCode.OUT_OF_RANGE,
    errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_WORKER: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_GPU: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_COMMAND: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_PROCESS: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_WORKLOAD_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    errors_pb2.ERROR_REASON_ALREADY_REGISTERED: grpc.StatusCode.ALREADY_EXISTS,
    errors_pb2.ERROR_REASON_WORKLOAD_BUSY: grpc.StatusCode.ABORTED,
    errors_pb2.ERROR_REASON_GENERATION_MISMATCH: grpc.StatusCode.ABORTED,
    errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_NO_FREE_GPU: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_TOO_MANY_CALLS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_TOO_MANY_WORKERS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY: grpc.StatusCode.UNIMPLEMENTED,
    errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE: grpc.StatusCode.INTERNAL,
    errors_pb2.ERROR_REASON_INTERNAL: grpc.StatusCode.INTERNAL,
}
"""The rest are FAILED_PRECONDITION. UNAVAILABLE is none of ours: it means that there is no coordinator."""


RETRY_AFTER: Final[dict[ErrorReason.ValueType, duration_pb2.Duration]] = {
    errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS: duration_pb2.Duration(seconds=1),
    errors_pb2.ERROR_REASON_TOO_MANY_CALLS: duration_pb2.Duration(seconds=1),
}
"""When the same request may be served, as google.rpc.RetryInfo. Other refusals don't pass by themselves."""


MESSAGE_LIMIT_BYTES: Final = 1_536
METADATA_LIMIT_BYTES: Final = 1_024
"""What a refusal may have: it travels in the trailers of a call, twice and encoded, and these hold 8 KiB."""


class FleetError(Exception):
    """A request is refused. A long value in it is cut.

    Attributes:
        reason: The typed reason of the wire.
        message: One sentence for a person: the value, the rule and the remedy.
        metadata: Facts for programs.
    """

    def __init__(self, reason: ErrorReason.ValueType, message: str, **metadata: str) -> None:
        self.message = _cut(message, MESSAGE_LIMIT_BYTES)
        super().__init__(self.message)
        self.reason = reason
        self.metadata = _fitting(metadata)

    @classmethod
    def from_proto(cls, error: errors_pb2.Error) -> "FleetError":
        """A worker's error, passed on as it is."""
        passed_on = cls(error.reason, error.message)
        passed_on.metadata = _fitting(error.metadata)
        return passed_on

    def to_proto(self) -> errors_pb2.Error:
        """The same error as a message of frames and results."""
        return errors_pb2.Error(reason=self.reason, message=self.message, metadata=self.metadata)


def _cut(text: str, limit_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= limit_bytes:
        return text
    half = limit_bytes // 2  # a remedy stands at the end
    return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"


def _fitting(metadata: Mapping[str, str]) -> dict[str, str]:
    """As many of the facts as fit."""
    kept: dict[str, str] = {}
    used_bytes = 0
    for key, value in metadata.items():
        used_bytes += len(key.encode()) + len(value.encode())
        if used_bytes <= METADATA_LIMIT_BYTES:
            kept[key] = value
    return kept


class StartError(Exception):
    """The coordinator can't start; its text is one sentence with the remedy."""


def invalid(field: str, message: str) -> FleetError:
    """A field of a request breaks its rule."""
    return FleetError(errors_pb2.ERROR_REASON_INVALID_ARGUMENT, message, field=field)


def reason_name(reason: ErrorReason.ValueType) -> str:
    """The reason as ErrorInfo carries it; the number of one that only a newer worker knows."""
    name = errors_pb2.ErrorReason.DESCRIPTOR.values_by_number.get(reason)
    return name.name.removeprefix("ERROR_REASON_") if name else str(reason)


def _packed(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: FleetError) -> NoReturn:
    """Ends a call with the error and its details."""
    code = _CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION)
    info = error_details_pb2.ErrorInfo(
        reason=reason_name(error.reason), domain=DOMAIN, metadata=error.metadata
    )
    details = [_packed(info)]
    if error.reason in RETRY_AFTER:
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=RETRY_AFTER[error.reason])))
    status = rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=error.message, details=details)
    )
    context.set_trailing_metadata(status.trailing_metadata)
    await context.abort(status.code, status.details)
