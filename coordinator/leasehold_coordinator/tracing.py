"""Traces by OpenTelemetry, with parents and children in other processes.

Nothing of OpenTelemetry is imported unless the environment names an OTLP endpoint and the extra ``tracing``
is installed. Otherwise :func:`begin` returns None, and trace contexts of callers are only passed on. A trace
context is text, as W3C's header ``traceparent`` has it: the protos and the metadata of gRPC carry it.
"""

import logging
import os
import re
from typing import TYPE_CHECKING, Final, TypeAlias, final

if TYPE_CHECKING:
    from opentelemetry import trace

logger = logging.getLogger(__name__)

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of OpenTelemetry, of which one names the collector's address for OTLP over HTTP."""

EXPORT_TIMEOUT_S: Final = 5
"""Time of one export, and of the last one at the end of the process."""

_TRACE_PARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")

Attribute: TypeAlias = str | int | float | bool

_tracers: Final[list["trace.Tracer"]] = []
"""The tracer, once there is one."""


def open_tracing(service: str, version: str) -> None:
    """Begins to export spans, if the environment names an endpoint. A further call does nothing.

    The exporter has a thread of its own and a bounded queue. Spans beyond the bound are dropped.

    Args:
        service: The name of the service. The variable OTEL_SERVICE_NAME overrides it.
        version: Its version.
    """
    if _tracers or not any(os.environ.get(name) for name in ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME") or service
        provider = TracerProvider(
            resource=Resource.create({"service.name": name, "service.version": version})
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)))
    except ImportError as error:
        logger.warning(
            "no traces are exported: %s names a collector, and %s is not installed: install the wheel of "
            "Leasehold with the extra tracing",
            " or ".join(ENDPOINTS),
            error.name,
        )
        return
    except ValueError as error:
        logger.warning(
            "no traces are exported: OpenTelemetry refuses a variable OTEL_* (%s): correct the variable",
            error,
        )
        return
    _tracers.append(provider.get_tracer("leasehold", version))


def is_on() -> bool:
    """Whether spans are exported."""
    return bool(_tracers)


@final
class Span:
    """A span that has begun. End it exactly once."""

    def __init__(self, span: "trace.Span") -> None:
        self._span = span

    @property
    def trace_parent(self) -> str:
        """The trace context for children."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, error: str = "", end_ns: int | None = None) -> None:
        """Ends the span.

        Args:
            error: The reason of the failure. Empty: there was none.
            end_ns: When it ended, in nanoseconds of the Unix epoch. None: now.
        """
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


def begin(name: str, parent: str = "", start_ns: int | None = None, **attributes: Attribute) -> Span | None:
    """Begins a span. None: no spans are exported.

    Args:
        name: The name of the span.
        parent: The trace context of its parent. Empty or invalid: the span begins a trace.
        start_ns: When it began, in nanoseconds of the Unix epoch. None: now.
        attributes: Its attributes, without the prefix ``leasehold.``.
    """
    if not _tracers:
        return None
    from opentelemetry import context, trace

    around = context.Context()
    if (found := _TRACE_PARENT.fullmatch(parent)) is not None:
        trace_id, span_id, flags = (int(part, 16) for part in found.groups())
        remote = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
        around = trace.set_span_in_context(trace.NonRecordingSpan(remote), around)
    prefixed = {f"leasehold.{key}": value for key, value in attributes.items()}
    return Span(_tracers[0].start_span(name, around, attributes=prefixed, start_time=start_ns))


def valid(trace_parent: str) -> str:
    """A trace context of a peer, or an empty text if it is invalid."""
    return trace_parent if _TRACE_PARENT.fullmatch(trace_parent) else ""


def trace_id(trace_parent: str) -> str:
    """The id of the trace, for the log. Empty: the trace context is empty or invalid."""
    found = _TRACE_PARENT.fullmatch(trace_parent)
    return found[1] if found is not None else ""
