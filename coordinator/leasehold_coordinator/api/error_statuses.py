"""Refusals as gRPC statuses with their details."""

from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from leasehold_coordinator.api.status_codes import status_code
from leasehold_coordinator.errors import DOMAIN, FleetError, reason_name
from leasehold_coordinator.timestamps import duration

FIELD_LIMIT_BYTES: Final = 256
"""Bound of a field's path, and of its description, in BadRequest. The message has the whole text."""


def _first_bytes(text: str) -> str:
    return text.encode()[:FIELD_LIMIT_BYTES].decode(errors="ignore")


def _packed(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: FleetError) -> NoReturn:
    """Ends a call with an error and its details.

    gRPC keeps the exception that this raises, with all frames that the exception passes. A frame that refers
    to the context makes a reference cycle, which only the garbage collector frees while every call waits. So
    ``abort`` forgets the context and the frames of the error, and callers that many peers reach do so, too.
    """
    code = status_code(error.reason)
    info = error_details_pb2.ErrorInfo(
        reason=reason_name(error.reason), domain=DOMAIN, metadata=error.metadata
    )
    details = [_packed(info)]
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_first_bytes(error.metadata.get("field", "")), description=_first_bytes(error.message)
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        delay = duration(error.retry_after_s)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=error.message, details=details)
    )
    context.set_trailing_metadata(status.trailing_metadata)
    error.__traceback__ = error.__context__ = None
    aborting = context.abort(status.code, status.details)
    del context
    await aborting
