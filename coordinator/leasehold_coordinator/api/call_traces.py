"""A client's call as a part of the client's trace."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc

from leasehold_coordinator import tracing
from leasehold_coordinator.fleet.command_traces import note_trace

TRACE_PARENT_KEY: Final = "traceparent"
"""Metadata of a call with the client's trace context, as W3C names the header."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Work: TypeAlias = Callable[[Any, Context], Awaitable[object]]


def traced(method: str, serve: Work) -> Work:
    """A call within the trace of its client. The span of a call that is refused has an error."""

    async def serve_traced(requests: object, context: Context) -> object:
        parent = _trace_parent(context)
        span = tracing.begin(f"serve {method.removeprefix('/')}", parent)
        if span is None and not parent:
            work = serve(requests, context)
            del requests, context  # see abort
            return await work
        note_trace(span.trace_parent if span is not None else parent)
        work = serve(requests, context)
        del requests, context
        error = "cancelled"
        try:
            response = await work
            error = ""
        except grpc.aio.AbortError:
            error = "refused"
            raise
        finally:
            if span is not None:
                span.end(error)
        return response

    return serve_traced


def _trace_parent(context: Context) -> str:
    """The trace context that a client sends. Empty: none, or an invalid one."""
    for key, value in context.invocation_metadata() or ():
        if key == TRACE_PARENT_KEY and isinstance(value, str):
            return tracing.valid(value)
    return ""
