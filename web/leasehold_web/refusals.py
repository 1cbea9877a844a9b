"""Errors of the API as answers of the page."""

from typing import Final

import grpc
from aiohttp import web
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from leasehold_web.documents import Document

_DETAILS: Final = "grpc-status-details-bin"

_STATUSES: Final = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_OUTAGES: Final = {
    grpc.StatusCode.UNAVAILABLE: "the coordinator does not answer: try again once it runs",
    grpc.StatusCode.DEADLINE_EXCEEDED: "the coordinator did not answer in time: try again",
}
"""Messages without the words of gRPC, which name addresses and system calls."""


def refusal(error: grpc.aio.AioRpcError) -> Document:
    """Reason, message and metadata of an error. The reason of an outage is empty."""
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            try:
                details = status_pb2.Status.FromString(value).details
                any(detail.Unpack(info) for detail in details)
            except DecodeError:
                break
    message = error.details() or ""
    if not info.reason:
        message = _OUTAGES.get(error.code()) or f"the coordinator failed ({error.code().name}: {message})"
    return {"reason": info.reason, "message": message, "metadata": dict(info.metadata)}


def status_of(error: grpc.aio.AioRpcError) -> int:
    """The HTTP status of an error."""
    return _STATUSES.get(error.code(), 502)


def problem(status: int, message: str, reason: str = "") -> web.HTTPException:
    """An answer of the page itself, as JSON like those of the API."""
    text = web.json_response({"reason": reason, "message": message, "metadata": {}}).text
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        403: web.HTTPForbidden,
        404: web.HTTPNotFound,
        429: web.HTTPTooManyRequests,
        503: web.HTTPServiceUnavailable,
    }
    return kinds[status](text=text, content_type="application/json")
