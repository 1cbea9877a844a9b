"""The gRPC code of each reason. docs/errors.md says why, and a test compares both.

A generic client retries a call on UNAVAILABLE alone (AIP-194). So a reason has this code if, and only if, the
unchanged call may succeed within a short time.
"""

from typing import Final

import grpc
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason

_REASONS: Final[dict[grpc.StatusCode, tuple[ErrorReason.ValueType, ...]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (
        errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
        errors_pb2.ERROR_REASON_DUPLICATE_GPU,
        errors_pb2.ERROR_REASON_INVALID_TOKEN,
        errors_pb2.ERROR_REASON_REQUEST_ID_REUSED,
    ),
    grpc.StatusCode.NOT_FOUND: (
        errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
        errors_pb2.ERROR_REASON_UNKNOWN_WORKER,
        errors_pb2.ERROR_REASON_UNKNOWN_GPU,
        errors_pb2.ERROR_REASON_UNKNOWN_COMMAND,
        errors_pb2.ERROR_REASON_UNKNOWN_PROCESS,
        errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
        errors_pb2.ERROR_REASON_UNKNOWN_HOLD,
        errors_pb2.ERROR_REASON_UNKNOWN_CERTIFICATE,
        errors_pb2.ERROR_REASON_UNKNOWN_JOIN_TOKEN,
        errors_pb2.ERROR_REASON_UNKNOWN_BINDING,
    ),
    grpc.StatusCode.ALREADY_EXISTS: (
        errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
        errors_pb2.ERROR_REASON_ALREADY_REGISTERED,
        errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID,
        errors_pb2.ERROR_REASON_DUPLICATE_WORKER_NAME,
        errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU,
        errors_pb2.ERROR_REASON_ALREADY_ENROLLED,
    ),
    grpc.StatusCode.UNAVAILABLE: (
        errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
        errors_pb2.ERROR_REASON_WORKER_DRAINING,
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        errors_pb2.ERROR_REASON_ISSUER_UNAVAILABLE,
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
        errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
        errors_pb2.ERROR_REASON_TOO_MANY_WORKERS,
        errors_pb2.ERROR_REASON_TOO_MANY_BLOCKS,
        errors_pb2.ERROR_REASON_TOO_MANY_JOIN_TOKENS,
        errors_pb2.ERROR_REASON_TOO_MANY_BINDINGS,
        errors_pb2.ERROR_REASON_NO_FREE_GPU,
        errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY,
        errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
        errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
        errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
    ),
    grpc.StatusCode.ABORTED: (
        errors_pb2.ERROR_REASON_WORKLOAD_BUSY,
        errors_pb2.ERROR_REASON_GENERATION_MISMATCH,
        errors_pb2.ERROR_REASON_ETAG_MISMATCH,
    ),
    grpc.StatusCode.UNAUTHENTICATED: (errors_pb2.ERROR_REASON_UNAUTHENTICATED,),
    grpc.StatusCode.PERMISSION_DENIED: (
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        errors_pb2.ERROR_REASON_JOIN_REFUSED,
        errors_pb2.ERROR_REASON_CERTIFICATE_CLONED,
    ),
    grpc.StatusCode.UNIMPLEMENTED: (errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        errors_pb2.ERROR_REASON_EXPIRED,
        errors_pb2.ERROR_REASON_CALL_TIMEOUT,
    ),
    grpc.StatusCode.CANCELLED: (errors_pb2.ERROR_REASON_CANCELLED,),
    grpc.StatusCode.DATA_LOSS: (
        errors_pb2.ERROR_REASON_STORAGE_DAMAGED,
        errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT,
    ),
    grpc.StatusCode.INTERNAL: (
        errors_pb2.ERROR_REASON_INTERNAL,
        errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
    ),
}

_CODES: Final = {reason: code for code, reasons in _REASONS.items() for reason in reasons}


def status_code(reason: ErrorReason.ValueType) -> grpc.StatusCode:
    """The code of a reason. Reasons about the state of a workload or a host are FAILED_PRECONDITION."""
    return _CODES.get(reason, grpc.StatusCode.FAILED_PRECONDITION)
