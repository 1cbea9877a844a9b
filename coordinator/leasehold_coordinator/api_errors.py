"""The border of the client services: counts their calls, and turns refusals into gRPC statuses."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Protocol, TypeVar

import grpc

from leasehold_coordinator.callers import note_caller
from leasehold_coordinator.errors import FleetError, abort
from leasehold_coordinator.fleet import Fleet


class _OfFleet(Protocol):
    @property
    def fleet(self) -> Fleet: ...


Service = TypeVar("Service", bound=_OfFleet)
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[object, object]


def unary(
    method: Callable[[Service, Request, Context], Awaitable[Response]],
) -> Callable[[Service, Request, Context], Awaitable[Response]]:
    """Ends a unary call that is refused with the refusal's status."""

    @wraps(method)
    async def call(self: Service, request: Request, context: Context) -> Response:
        try:
            note_caller(context.peer())
            with self.fleet.calls.entered(context.peer()):
                return await method(self, request, context)
        except FleetError as error:
            await abort(context, error)

    return call


def streaming(
    method: Callable[[Service, Request, Context], AsyncIterator[Response]],
) -> Callable[[Service, Request, Context], AsyncIterator[Response]]:
    """Ends a stream that is refused with the refusal's status."""

    @wraps(method)
    async def call(self: Service, request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            with self.fleet.streams.entered(context.peer()):
                async for response in method(self, request, context):
                    yield response
        except FleetError as error:
            await abort(context, error)

    return call
