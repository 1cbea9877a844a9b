"""Refusals of the coordinator: google.rpc.Status on unary calls, Error in frames."""

from collections.abc import Mapping
from typing import Final

from google.protobuf import duration_pb2
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason

DOMAIN: Final = "leasehold"


RETRY_AFTER: Final[dict[ErrorReason.ValueType, duration_pb2.Duration]] = {
    errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS: duration_pb2.Duration(seconds=1),
    errors_pb2.ERROR_REASON_TOO_MANY_CALLS: duration_pb2.Duration(seconds=1),
}
"""When the same request may be served, as google.rpc.RetryInfo. Other refusals don't pass by themselves."""


MESSAGE_LIMIT_BYTES: Final = 1_536
METADATA_LIMIT_BYTES: Final = 1_024
"""Bounds of a refusal. The trailers of a call carry each refusal twice, encoded, and hold 8 KiB."""


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
