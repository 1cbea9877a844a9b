"""The border of the client services: counts their calls, reads requests, and turns refusals into statuses.

gRPC calls the handler of a unary request once that is there. Until then a call that sends nothing but its
headers holds a place for as long as its client likes. So requests are read here, in bounded time, and a call
counts as its host's from its headers to its last response.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, NoReturn, TypeAlias, final

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.worker.v1 import session_pb2

from leasehold_coordinator.core.message_values import find_problem
from leasehold_coordinator.errors import DOMAIN, RETRY_AFTER, FleetError, invalid, reason_name
from leasehold_coordinator.fleet.callers import CALL_LIMIT, LIST_LIMIT, STREAM_LIMIT, CallLimits, note_caller

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 5.0
"""How long a request may take to come, after the headers of its call."""

WORKERS: Final = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
"""The service that has a border of its own."""

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Work: TypeAlias = Callable[[Any, Context], Awaitable[object]]
"""A function that serves a call. The result is the response of a call without a response stream."""


@final
class Border(grpc.aio.ServerInterceptor):
    """Lets calls in, whatever service they are for. Workers have a border of their own."""

    def __init__(self) -> None:
        self._calls, self._lists, self._streams = (
            CallLimits(CALL_LIMIT),
            CallLimits(LIST_LIMIT),
            CallLimits(STREAM_LIMIT),
        )
        """Calls, lists and streams of clients that are under way."""
        self._handlers: dict[str, Handler] = {}
        """By method, of those that were called and that a service has."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The handler of a call, within the border. None: no service has its method."""
        method = handler_call_details.method
        if method not in self._handlers:
            found = await continuation(handler_call_details)
            if found is None or method.startswith(f"/{WORKERS}/"):
                return found
            self._handlers[method] = self._within(method, found)
        return self._handlers[method]

    def _within(self, method: str, handler: Handler) -> Handler:
        """A handler that does the work of another within the border."""
        if handler.request_streaming:
            work, parse = _both_ways(handler), handler.request_deserializer
        else:
            work, parse = _one_request(handler), _parser(handler)
        places = self._places(method, handler)

        async def serve(requests: object, context: Context) -> object:
            try:
                peer = context.peer()
                note_caller(peer)
                leave = places.enter(peer)
                # Once the call is over: a response that its client does not read still takes up memory.
                context.add_done_callback(lambda _: leave())  # type: ignore[arg-type]  # any callable will do
                return await work(requests, context)
            except FleetError as error:
                await abort(context, error)
            except grpc.aio.AbortError:
                raise
            except (grpc.aio.InternalError, grpc.aio.UsageError):
                return None  # the client went away while a response was on its way
            except Exception:
                logger.exception("a call of %s failed", method)
                await abort(context, _DEFECT)

        streams = handler.response_streaming
        build = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return build(
            serve,
            request_deserializer=parse,
            response_serializer=handler.response_serializer,
        )

    def _places(self, method: str, handler: Handler) -> CallLimits:
        if handler.response_streaming:
            return self._streams
        return self._lists if method.rpartition("/")[2].startswith("List") else self._calls


def _one_request(handler: Handler) -> Work:
    respond: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def work(_: object, context: Context) -> object:
        responses = respond(await _read(context), context)
        if not handler.response_streaming:
            return await responses  # gRPC sends it together with the status
        if isinstance(responses, AsyncGenerator):
            await _write_all(responses, context)
        else:  # as those of the health service, which writes by context too
            await responses
        return None

    return work


def _both_ways(handler: Handler) -> Work:
    respond: Any = handler.stream_stream

    async def work(requests: object, context: Context) -> None:
        await _write_all(respond(requests, context), context)

    return work


async def _write_all(responses: AsyncGenerator[object], context: Context) -> None:
    async with aclosing(responses):  # what it holds is let go of at once
        async for response in responses:
            await context.write(response)


async def _read(context: Context) -> object:
    """The request of a call.

    Raises:
        FleetError: INVALID_ARGUMENT, it did not come in time, or is none.
    """
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request: object = await context.read()
    except TimeoutError:
        request = grpc.aio.EOF
    if request is grpc.aio.EOF:
        raise invalid("request", f"no request came: send it within {REQUEST_TIMEOUT_S:g} s")
    if request is None:
        raise invalid("request", "the request is none of this method: send it as its proto says")
    if isinstance(request, Message) and (problem := find_problem(request)):
        raise invalid(problem.path, f"invalid {problem.path}: {problem.text}")
    return request


def _parser(handler: Handler) -> Callable[[bytes], object]:
    """Reads requests. None for bytes that are none."""

    def parse(data: bytes) -> object:
        try:
            return handler.request_deserializer(data) if handler.request_deserializer else data
        except DecodeError:
            return None

    return parse


_DEFECT: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERNAL, "a defect of Leasehold: see the coordinator's log, and report it"
)


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
    errors_pb2.ERROR_REASON_ETAG_MISMATCH: grpc.StatusCode.ABORTED,
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
"""All other reasons are FAILED_PRECONDITION. Only gRPC itself answers UNAVAILABLE, without a coordinator."""


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
