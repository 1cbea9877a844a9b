"""Turns refusals of the client services into gRPC statuses, at their border."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import TypeVar

import grpc

from leasehold_coordinator.errors import FleetError, abort

Service = TypeVar("Service")
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
            async for response in method(self, request, context):
                yield response
        except FleetError as error:
            await abort(context, error)

    return call
