"""A span for each unary call, whose trace context travels with the call."""

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


def begin_call(method: str) -> tracing.Span | None:
    """Begins the span of a call. None: no spans are exported.

    Args:
        method: The path of the method.
    """
    return tracing.begin(f"call {method.removeprefix('/')}", os.environ.get(PARENT_VARIABLE, ""))


@final
class TraceInterceptor(grpc.UnaryUnaryClientInterceptor):
    """Begins a span for each unary call."""

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: object
    ) -> Any:
        """Makes a call within a span."""
        span = begin_call(client_call_details.method)
        if span is None:
            return continuation(client_call_details, request)

        def end(call: grpc.Call) -> None:
            code = call.code()
            span.end("" if code in (None, grpc.StatusCode.OK) else code.name)

        call = continuation(with_header(client_call_details, TRACE_PARENT_KEY, span.trace_parent), request)
        call.add_done_callback(end)
        return call
