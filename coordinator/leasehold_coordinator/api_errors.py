"""The border of the client services: counts their calls, reads requests, and turns refusals into statuses.

gRPC calls the handler of a unary request once that is there. Until then a call that sends nothing but its
headers holds a place for as long as its client likes. So requests are read here, in bounded time, and a call
counts as its host's from its headers to its last response.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias, final

import grpc
from google.protobuf.message import DecodeError
from leasehold.v1 import errors_pb2, worker_session_pb2

from leasehold_coordinator.callers import CALL_LIMIT, LIST_LIMIT, STREAM_LIMIT, Calls, note_caller
from leasehold_coordinator.errors import FleetError, abort, invalid

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 5.0
"""How long a request may take to come, after the headers of its call."""

WORKERS: Final = worker_session_pb2.DESCRIPTOR.services_by_name["WorkerSessionService"].full_name
"""The service that has a border of its own."""

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Work: TypeAlias = Callable[[Any, Context], Awaitable[object]]
"""What serves a call. Its result is the response, unless responses are a stream."""


@final
class Border(grpc.aio.ServerInterceptor):
    """Lets calls in, whatever service they are for. Workers have a border of their own."""

    def __init__(self) -> None:
        self._calls, self._lists, self._streams = Calls(CALL_LIMIT), Calls(LIST_LIMIT), Calls(STREAM_LIMIT)
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

    def _places(self, method: str, handler: Handler) -> Calls:
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
