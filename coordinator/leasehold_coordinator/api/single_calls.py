"""Unary calls without the roles of clients: enrolment, and renewal by workers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from leasehold.v1 import errors_pb2

from leasehold_coordinator.api.error_statuses import abort
from leasehold_coordinator.api.rpc_errors import REQUEST_TIMEOUT_S, Context
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.callers import CallLimits, host_of
from leasehold_coordinator.message_values import find_problem

logger = logging.getLogger(__name__)

CALL_LIMIT: Final = 64
"""Most concurrent calls of one method."""

Request = TypeVar("Request", bound=Message)


def single_call(
    kind: type[Request], respond: Callable[[Request, Context], Awaitable[Message]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """The handler of a unary method, with a limit, a timeout for the request and typed errors.

    Args:
        kind: The type of the request.
        respond: Authenticates the caller before anything else, and answers a request.
    """
    places = CallLimits(CALL_LIMIT)

    async def serve(_: object, context: Context) -> Message | None:
        try:
            leave = places.enter(host_of(context.peer()))
            cast("asyncio.Task[object]", asyncio.current_task()).add_done_callback(lambda _: leave())
            return await respond(await _read(kind, context), context)
        except FleetError as error:
            ending = abort(context, error)
            del context  # see abort
            await ending
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError:
            return None  # the caller disconnected, or the server stopped
        except Exception:
            logger.exception("a call failed: %s", kind.__name__)
            await abort(context, _DEFECT)

    return grpc.stream_unary_rpc_method_handler(
        serve, request_deserializer=bytes, response_serializer=lambda message: message.SerializeToString()
    )


async def _read(kind: type[Request], context: Context) -> Request:
    """The request of a call.

    Raises:
        FleetError: INVALID_ARGUMENT, the request is late or malformed.
    """
    data: object = None
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            data = await context.read()
        request = kind.FromString(data) if isinstance(data, bytes) else None
    except (TimeoutError, DecodeError):
        request = None
    if request is None:
        raise invalid(
            "request",
            f"no {kind.__name__} came: send the message of this method within {REQUEST_TIMEOUT_S:g} s",
        )
    if problem := find_problem(request):
        raise invalid(problem.path, f"invalid {problem.path}: {problem.text}")
    return request


_DEFECT: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERNAL, "internal error: see the coordinator's log, and report the defect"
)
