"""A span for each unary call, whose trace context travels with the call. Streams have none."""

import os
from collections.abc import Callable
from typing import Any, Final, final

import grpc

from leasehold_client import tracing
from leasehold_client.coordinator.header_interceptor import with_header

TRACE_PARENT_KEY: Final = "traceparent"
"""Metadata of a call with its trace context, as W3C names the header."""

PARENT_VARIABLE: Final = "TRACEPARENT"
"""Variable with the trace context of a program that runs `leasehold`."""


@final
class TraceInterceptor(grpc.UnaryUnaryClientInterceptor):
    """Begins a span for each unary call."""

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: object
    ) -> Any:
        """Makes a call within a span."""
        span = _begin(client_call_details.method)
        if span is None:
            return continuation(client_call_details, request)

        def end(call: grpc.Call) -> None:
            code = call.code()
            span.end("" if code in (None, grpc.StatusCode.OK) else code.name)

        call = continuation(with_header(client_call_details, TRACE_PARENT_KEY, span.trace_parent), request)
        call.add_done_callback(end)
        return call


@final
class AsyncTraceInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """Begins a span for each unary call of the asynchronous client."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: object,
    ) -> Any:
        """Makes a call within a span. The span of a cancelled call has an error."""
        details = client_call_details
        span = _begin(os.fsdecode(details.method))  # gRPC gives bytes here
        if span is None:
            return await continuation(details, request)
        header = (TRACE_PARENT_KEY, span.trace_parent)
        traced_details = grpc.aio.ClientCallDetails(
            details.method,
            details.timeout,
            grpc.aio.Metadata(*(details.metadata or ()), header),
            details.credentials,
            details.wait_for_ready,
        )
        error = "CANCELLED"
        try:
            call = await continuation(traced_details, request)
            code = await call.code()
            error = "" if code is grpc.StatusCode.OK else code.name
        finally:
            span.end(error)
        return call


def trace_interceptors() -> list[AsyncTraceInterceptor]:
    """The interceptors of an asynchronous channel: one if spans are exported."""
    tracing.open_tracing("leasehold-client")
    return [AsyncTraceInterceptor()] if tracing.is_on() else []


def traced(channel: grpc.Channel) -> grpc.Channel:
    """A synchronous channel whose calls have spans, if spans are exported."""
    tracing.open_tracing("leasehold-client")
    return grpc.intercept_channel(channel, TraceInterceptor()) if tracing.is_on() else channel


def _begin(method: str) -> tracing.Span | None:
    return tracing.begin(f"call {method.removeprefix('/')}", os.environ.get(PARENT_VARIABLE, ""))
