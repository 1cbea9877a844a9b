"""The server interceptor of the client services: limits calls, reads requests, and maps refusals to statuses.

gRPC calls a unary handler only after the request has arrived. A client that sends only headers would hold a
place without limit. So every request is read here within a timeout. A call counts against its caller's
limit from its headers to its last response.
"""

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast, final

import grpc
from google.protobuf.message import DecodeError, Message
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.named_resources import named_resources
from leasehold_coordinator.api.authorization import Authorization
from leasehold_coordinator.api.call_traces import traced
from leasehold_coordinator.api.error_statuses import abort
from leasehold_coordinator.api.live_streams import LiveStreams
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.audit_refusals import AuditRefusals
from leasehold_coordinator.fleet.caller_bounds import CallerBounds
from leasehold_coordinator.fleet.callers import (
    CALL_LIMIT,
    LIST_LIMIT,
    STREAM_LIMIT,
    CallLimits,
    counted_caller,
    current_caller,
    current_request,
    host_of,
    note_caller,
    note_request,
    require_caller,
)
from leasehold_coordinator.fleet.live_calls import LiveCalls
from leasehold_coordinator.message_values import find_problem

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 5.0
"""How long a request may take to arrive after the headers of its call."""

CALL_TIMEOUT_S: Final = 35.0
"""How long a unary call may take. The longest wait of one is for a worker's plan, 30 s."""

REFUSED_LIMIT: Final = 256
"""Most refused calls at once whose requests are read for the audit. Further calls are refused unread."""

LONG_CALLS: Final = (
    "/leasehold.v1.WorkloadService/Plan",
    "/leasehold.v1.WorkloadService/ListCheckpoints",
)
"""Unary calls that change nothing and wait for a worker. They end with the caller's role, as streams do."""

Context: TypeAlias = grpc.aio.ServicerContext[object, object]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Work: TypeAlias = Callable[[Any, Context], Awaitable[object]]
"""A function that serves a call. The result is the response of a call without a response stream."""


class Authenticator(Protocol):
    """Establishes the callers of a listener."""

    calls: LiveCalls
    """The calls under way."""

    async def client(self, context: Context) -> Caller:
        """The caller, without a role.

        Raises:
            FleetError: The caller is unknown.
        """
        ...


@final
class Border(grpc.aio.ServerInterceptor):
    """Intercepts the calls of a listener for clients.

    Args:
        authentication: Establishes the callers.
        authorization: Decides which methods they may call.
        live: The streams under way.
        audit: Told of refusals.
        bounds: The requests and streams of each caller.
    """

    def __init__(
        self,
        authentication: Authenticator,
        authorization: Authorization,
        live: LiveStreams,
        audit: AuditRefusals,
        bounds: CallerBounds,
    ) -> None:
        self._audit = audit
        self._bounds = bounds
        self._authentication = authentication
        self._authorization = authorization
        self._live = live
        self._calls, self._lists, self._streams = (
            tuple(CallLimits(limit) for _ in range(2)) for limit in (CALL_LIMIT, LIST_LIMIT, STREAM_LIMIT)
        )
        """Calls, lists and streams of clients under way: those of others, and those of the coordinator's own
        user and of root, who must be able to act during a flood."""
        self._refused = CallLimits(REFUSED_LIMIT)
        self._handlers: dict[str, Handler] = {}
        """Wrapped handlers by method. A cache of the methods that were called."""

    def beside(self, authentication: Authenticator) -> "Border":
        """The border of another listener, whose callers count against the same limits.

        Args:
            authentication: Establishes the callers.
        """
        other = copy.copy(self)
        other._authentication = authentication
        other._handlers = {}
        return other

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The wrapped handler of a call. None: no service has the method."""
        method = handler_call_details.method
        if method not in self._handlers:
            found = await continuation(handler_call_details)
            if found is None:
                return None
            self._handlers[method] = self._within(method, found)
        return self._handlers[method]

    def _within(self, method: str, handler: Handler) -> Handler:
        """Wraps a handler with the limits, the read timeout and the mapping of errors."""
        if handler.request_streaming:
            work = _both_ways(handler)
        else:
            work = _one_request(method, handler, self._bounds, self._check_again)
        parse, places, streams = _parser(handler), self._places(method, handler), handler.response_streaming

        async def serve(requests: object, context: Context) -> object:
            acting: Caller | None = None
            try:
                found = await self._authentication.client(context)
                note_caller(found)  # a refusal counts for the caller
                self._bounds.admit(found)
                acting = self._authorization.acting(found, context)
                caller = self._authorization.authorize(method, acting)
                note_caller(caller)
                self._bounds.admit_user(caller)
                _count_until_end(places[caller.is_local_admin].enter(counted_caller()))
                if streams:
                    _count_until_end(self._bounds.open_stream(caller))
                if handler.request_streaming:
                    requests = _admitted(requests, caller, self._bounds)
                async with AsyncExitStack() as scope:
                    await scope.enter_async_context(self._authentication.calls.serving(caller))
                    if not streams:
                        await scope.enter_async_context(_deadline())
                    if streams or method in LONG_CALLS:
                        await scope.enter_async_context(self._live.entered(caller, method))
                    return await work(requests, context)
            except FleetError as error:
                address = host_of(context.peer())
                resources: tuple[str, ...] = ()
                try:
                    if not handler.request_streaming:
                        resources = await self._named(error, method, context)
                finally:  # also if the caller has gone
                    refused = acting or current_caller()
                    self._audit.note(error, method, address, caller=refused, resources=resources)
                if current_caller() is None:
                    error = self._bounded(error, address)
                await self._bounds.hold(error, counted_caller() or address)
                ending = abort(context, error)
                del requests, context  # see abort
                await ending
            except grpc.aio.AbortError:
                raise
            except grpc.aio.BaseError:
                return None  # during a response, the client disconnected or the server stopped
            except NotImplementedError:  # such as List of gRPC's health service
                name = method.rpartition("/")[2]
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not implemented")
            except Exception:
                logger.exception("a call of %s failed", method)
                await abort(context, _DEFECT)

        build = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return build(
            serve if streams else traced(method, serve),
            request_deserializer=parse,
            response_serializer=handler.response_serializer,
        )

    async def _named(self, error: FleetError, method: str, context: Context) -> tuple[str, ...]:
        """The resources that a refused call names, for the audit.

        A refusal by the role comes before the request, which is then read here. Its bytes count for the
        identity that called, and not for a user for whom that identity wants to act. No resources are named
        if the request does not arrive or can't be parsed, or if too many refused calls are under way.
        """
        known = current_request()
        if known is not None:
            return named_resources(*known)
        if error.reason != errors_pb2.ERROR_REASON_NOT_PERMITTED:
            return ()
        try:
            with self._refused.entered(counted_caller()):
                request = await _receive(context, self._bounds)
        except (FleetError, grpc.aio.BaseError):
            return ()
        return named_resources(method, request) if isinstance(request, Message) else ()

    def _check_again(self, method: str) -> None:
        """Refuses a caller that lost the permission, or was blocked, before its request arrived.

        Raises:
            FleetError: NOT_PERMITTED or UNAUTHENTICATED.
        """
        caller = require_caller()
        self._authentication.calls.require(caller)
        present = self._authorization.authorize(method, caller)
        if present.role < caller.role:  # a stronger role would outlive its end in a stream
            note_caller(present)

    def _bounded(self, refusal: FleetError, address: str) -> FleetError:
        """The refusal of a call without an identity, or that of an address with too many such calls."""
        try:
            self._bounds.admit_unknown(address)
        except FleetError as error:
            return error
        return refusal

    def _places(self, method: str, handler: Handler) -> tuple[CallLimits, ...]:
        if handler.response_streaming:
            return self._streams
        return self._lists if _is_list(method) else self._calls


def _is_list(method: str) -> bool:
    return method.rpartition("/")[2].startswith("List")


@asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    """A context that lasts 35 s at most. A change that was begun is finished nevertheless.

    Raises:
        FleetError: CALL_TIMEOUT.
    """
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise FleetError(
            errors_pb2.ERROR_REASON_CALL_TIMEOUT,
            f"the call took longer than {CALL_TIMEOUT_S:g} s, so whether it changed anything is unknown: "
            "look before you repeat it, or repeat it with the same request_id",
        ) from None


def _count_until_end(leave: Callable[[], None]) -> None:
    """Ends a count at the end of the call: a response that its client does not read takes memory.

    The task of a call ends then. A callback of the context would make a reference cycle.
    """
    cast("asyncio.Task[object]", asyncio.current_task()).add_done_callback(lambda _: leave())


async def _admitted(requests: Any, caller: Caller, bounds: CallerBounds) -> AsyncGenerator[object]:
    """The requests of a stream, each of which counts.

    Raises:
        FleetError: INVALID_ARGUMENT, a request can't be parsed.
    """
    async for received in requests:
        bounds.admit(caller)
        yield received.parsed()


def _one_request(
    method: str, handler: Handler, bounds: CallerBounds, check_again: Callable[[str], None]
) -> Work:
    respond: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
    is_local_list = _is_list(method) and method not in LONG_CALLS

    async def work(_: object, context: Context) -> object:
        request = await _read(method, context, bounds)
        check_again(method)
        if is_local_list:
            return await bounds.list_in_turn(require_caller(), lambda: respond(request, context))
        responses = respond(request, context)
        if not handler.response_streaming:
            return await responses  # gRPC sends it together with the status
        if isinstance(responses, AsyncGenerator):
            await _write_all(responses, context)
        else:  # a coroutine that writes through the context, as in the health service
            await responses
        return None

    return work


def _both_ways(handler: Handler) -> Work:
    respond: Any = handler.stream_stream

    async def work(requests: object, context: Context) -> None:
        await _write_all(respond(requests, context), context)

    return work


async def _write_all(responses: AsyncGenerator[object], context: Context) -> None:
    async with aclosing(responses):  # releases the generator's resources at once
        async for response in responses:
            await context.write(response)


async def _read(method: str, context: Context, bounds: CallerBounds) -> object:
    """The request of a call.

    Raises:
        FleetError: INVALID_ARGUMENT, the request is late or malformed.
    """
    request = await _receive(context, bounds)
    if isinstance(request, Message):
        note_request(method, request)  # a refusal names its resources
        if problem := find_problem(request):
            raise invalid(problem.path, f"invalid {problem.path}: {problem.text}")
    return request


async def _receive(context: Context, bounds: CallerBounds) -> object:
    """The request of a call, whose values may be invalid.

    Raises:
        FleetError: INVALID_ARGUMENT, the request is late or can't be parsed.
    """
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            received: object = await context.read()
    except TimeoutError:
        received = grpc.aio.EOF
    if not isinstance(received, _Received):
        raise invalid("request", f"no request came: send it within {REQUEST_TIMEOUT_S:g} s")
    bounds.charge(require_caller(), received.size_bytes)
    return received.parsed()


class _Received(NamedTuple):
    """A request, or None if it is malformed, and its size."""

    request: object
    size_bytes: int

    def parsed(self) -> object:
        """The request.

        Raises:
            FleetError: INVALID_ARGUMENT, the request can't be parsed.
        """
        if self.request is None:
            raise invalid("request", "the request can't be parsed: send the request message of this method")
        return self.request


def _parser(handler: Handler) -> Callable[[bytes], _Received]:
    """A parser of requests."""

    def parse(data: bytes) -> _Received:
        try:
            request = handler.request_deserializer(data) if handler.request_deserializer else data
        except DecodeError:
            request = None
        return _Received(request, len(data))

    return parse


_DEFECT: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERNAL, "internal error: see the coordinator's log, and report the defect"
)
