"""Refusals of the coordinator: google.rpc.Status on unary calls, Error in frames."""

from collections.abc import Mapping
from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason

DOMAIN: Final = "leasehold.dev"
"""``google.rpc.ErrorInfo.domain`` of every refusal."""

RETRY_AFTER_S: Final[dict[ErrorReason.ValueType, float]] = {
    errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS: 1.0,
    errors_pb2.ERROR_REASON_TOO_MANY_CALLS: 1.0,
    errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE: 1.0,
    errors_pb2.ERROR_REASON_WORKER_DRAINING: 1.0,
    errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE: 1.0,
    errors_pb2.ERROR_REASON_ISSUER_UNAVAILABLE: 1.0,
}
"""Reasons that pass by themselves, and the delay before a retry. Other reasons have none."""

STORE_FAILURES: Final = (
    errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
    errors_pb2.ERROR_REASON_STORAGE_DAMAGED,
)
"""Reasons of failures of the store, for which no peer is to blame."""

LONG_AWAY_RETRY_S: Final = 60.0
"""The delay before a retry if somebody has to start a worker first."""

MESSAGE_LIMIT_BYTES: Final = 1_280
METADATA_LIMIT_BYTES: Final = 1_024
"""Bounds of a refusal. The trailers of a call hold 8 KiB, and carry each refusal twice, encoded."""


class FleetError(Exception):
    """A request is refused. A long message is cut in the middle.

    Attributes:
        reason: The typed reason of the wire.
        message: One sentence for a person: the value, the rule and the remedy.
        metadata: Facts for programs.
        retry_after_s: Delay after which the unchanged request may succeed. None: somebody must act first.
        audited: The refusal in the audit, if the caller must not learn it. None: this refusal.
        cost_requests: What the refusal costs its caller, in requests, in addition to the request itself.
    """

    def __init__(
        self,
        reason: ErrorReason.ValueType,
        message: str,
        *,
        retry_after_s: float | None = None,
        **metadata: str,
    ) -> None:
        self.message = _cut(message, MESSAGE_LIMIT_BYTES)
        super().__init__(self.message)
        self.reason = reason
        self.metadata = _fitting(metadata)
        self.retry_after_s = retry_after_s or RETRY_AFTER_S.get(reason)
        self.audited: FleetError | None = None
        self.cost_requests = 0.0

    @classmethod
    def from_proto(cls, error: errors_pb2.Error) -> "FleetError":
        """A worker's error, passed on unchanged within the limits."""
        passed_on = cls(error.reason, error.message)
        passed_on.metadata = _fitting(error.metadata)
        return passed_on

    def to_proto(self) -> errors_pb2.Error:
        """The error as a message for frames and results."""
        return errors_pb2.Error(reason=self.reason, message=self.message, metadata=self.metadata)


def _cut(text: str, limit_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= limit_bytes:
        return text
    half = limit_bytes // 2  # the remedy is at the end
    return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"


def _fitting(metadata: Mapping[str, str]) -> dict[str, str]:
    """The entries that fit into METADATA_LIMIT_BYTES."""
    kept: dict[str, str] = {}
    used_bytes = 0
    for key, value in metadata.items():
        used_bytes += len(key.encode()) + len(value.encode())
        if used_bytes <= METADATA_LIMIT_BYTES:
            kept[key] = value
    return kept


class StartError(Exception):
    """The coordinator can't start. The text is one sentence with the remedy."""


def invalid(field: str, message: str) -> FleetError:
    """The refusal of a request with an invalid field."""
    return FleetError(errors_pb2.ERROR_REASON_INVALID_ARGUMENT, message, field=field)


def reason_name(reason: ErrorReason.ValueType) -> str:
    """The reason as ErrorInfo carries it. A reason of a newer worker is returned as a number."""
    name = errors_pb2.ErrorReason.DESCRIPTOR.values_by_number.get(reason)
    return name.name.removeprefix("ERROR_REASON_") if name else str(reason)
