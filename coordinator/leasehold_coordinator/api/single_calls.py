"""Unary calls without the roles of clients: enrolment, and renewal by workers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, cast, final

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
"""Most concurrent calls of one method whose request has arrived."""

AWAITED_LIMIT: Final = 64
"""Most concurrent calls of one method whose request has not arrived."""

Request = TypeVar("Request", bound=Message)


def single_call(
    kind: type[Request], respond: Callable[[Request, Context], Awaitable[Message]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """The handler of a unary method, with limits, a timeout for the request and typed errors.

    A call without its request takes no place of others, from however many addresses such calls come.

    Args:
        kind: The type of the request.
        respond: Authenticates the caller before anything else, and answers a request.
    """
    places, awaited = CallLimits(CALL_LIMIT), _AwaitedRequests()

    async def serve(_: object, context: Context) -> Message | None:
        try:
            request = await _read(kind, context, awaited)
            leave = places.enter(host_of(context.peer()))
            cast("asyncio.Task[object]", asyncio.current_task()).add_done_callback(lambda _: leave())
            return await respond(request, context)
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


@final
class _AwaitedRequests:
    """The calls of one method whose request has not arrived, the oldest first.

    A client sends headers and request together. So the oldest call is ended above the limit, and a call with
    a request is not.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, None] = {}

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """The context of the wait for a request.

        Raises:
            TimeoutError: The request is late.
        """
        async with asyncio.timeout(REQUEST_TIMEOUT_S) as scope:
            self._waiting[scope] = None
            if len(self._waiting) > AWAITED_LIMIT:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                oldest.reschedule(asyncio.get_running_loop().time())
            try:
                yield
            finally:
                self._waiting.pop(scope, None)


async def _read(kind: type[Request], context: Context, awaited: _AwaitedRequests) -> Request:
    """The request of a call.

    Raises:
        FleetError: INVALID_ARGUMENT, the request is late or malformed.
    """
    data: object = None
    try:
        async with awaited.waiting():
            data = await context.read()
        request = kind.FromString(data) if isinstance(data, bytes) else None
    except (TimeoutError, DecodeError):
        request = None
    if request is None:
        raise invalid(
            "request",
            f"no {kind.__name__} came: send the message of this method together with the call, and within "
            f"{REQUEST_TIMEOUT_S:g} s",
        )
    if problem := find_problem(request):
        raise invalid(problem.path, f"invalid {problem.path}: {problem.text}")
    return request


_DEFECT: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERNAL, "internal error: see the coordinator's log, and report the defect"
)
