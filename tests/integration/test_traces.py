"""One trace from the client's call to each driver call, as a collector of OpenTelemetry receives it."""

import http.server
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.integration.fleets import Fleet, make_fleet

PARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """A collector for OTLP over HTTP."""

    def __init__(self) -> None:
        spans = self.spans = dict[bytes, tuple[str, Span]]()
        """Service and span, by the span's id."""

        class Receiver(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {one.key: one.value.string_value for one in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans[span.span_id] = (names["service.name"], span)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def variables(self) -> dict[str, str]:
        """Variables of a process that exports its spans to this collector."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.address, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def path(self, span: Span) -> list[str]:
        """The names of a span and of its ancestors, from the client's call down, each with its service."""
        service, _ = self.spans[span.span_id]
        above = self.spans.get(span.parent_span_id)
        return [*(self.path(above[1]) if above else []), f"{service}: {span.name}"]

    def of_trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace."""
        return [span for _, span in list(self.spans.values()) if span.trace_id.hex() == trace_id]


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


@pytest.fixture
def fleet(collector: Collector, tmp_path: Path) -> Iterator[Fleet]:
    with make_fleet(tmp_path, "--log-format", "json", environment=collector.variables) as made:
        made.start_worker("alpha", settings='log_format = "json"\n')
        yield made


def leasehold(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a verb within the trace of a caller, as a process of its own."""
    environment = {**os.environ, **fleet.environment, **fleet.variables, "TRACEPARENT": PARENT}
    command = [sys.executable, "-m", "leasehold_client", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_one_trace_leads_from_the_call_to_each_driver_call(fleet: Fleet, collector: Collector) -> None:
    fleet.run_counter("one")
    assert leasehold(fleet, "suspend", "one").returncode == 0
    trace_id = PARENT.split("-")[1]

    def calls() -> list[Span]:
        return [span for span in collector.of_trace(trace_id) if span.name.startswith("driver ")]

    fleet.wait(lambda: len(calls()) >= 2)
    fleet.wait(lambda: any(span.name.startswith("call ") for span in collector.of_trace(trace_id)))
    fleet.wait(lambda: any(span.name.startswith("command ") for span in collector.of_trace(trace_id)))
    for kind in ("lock", "checkpoint"):
        (call,) = (span for span in calls() if span.name == f"driver {kind}")
        assert collector.path(call) == [
            "leasehold-client: call leasehold.v1.WorkloadService/SuspendWorkload",
            "leasehold-coordinator: serve leasehold.v1.WorkloadService/SuspendWorkload",
            "leasehold-coordinator: command suspend",
            "leasehold-worker: operation suspend",
            f"leasehold-worker: phase {kind}",
            f"leasehold-worker: driver {kind}",
        ]
        assert call.end_time_unix_nano > call.start_time_unix_nano
    for span in collector.of_trace(trace_id):
        assert span.status.code != Status.STATUS_CODE_ERROR, span
    for name in ("coordinator", "alpha"):
        lines = [json.loads(line) for line in fleet.log(name).splitlines() if line.startswith("{")]
        assert {line["trace"] for line in lines if line.get("verb") == "suspend"} == {trace_id}


@pytest.mark.long
def test_calls_of_the_asynchronous_client_are_spans(fleet: Fleet, collector: Collector) -> None:
    code = (
        "import asyncio\n"
        "from leasehold_client import AsyncClient, LeaseholdError\n"
        "async def main():\n"
        "    async with AsyncClient() as client:\n"
        "        await client.workers()\n"
        "        try:\n"
        "            await client.workload('nothing')\n"
        "        except LeaseholdError as error:\n"
        "            assert 'nothing' in error.message\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, **fleet.environment, **fleet.variables, "TRACEPARENT": PARENT}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    trace_id = PARENT.split("-")[1]
    fleet.wait(lambda: len(collector.of_trace(trace_id)) >= 4)
    codes = {span.name: span.status.code for span in collector.of_trace(trace_id)}
    assert codes["call leasehold.v1.FleetService/ListWorkers"] == Status.STATUS_CODE_UNSET
    assert codes["serve leasehold.v1.FleetService/ListWorkers"] == Status.STATUS_CODE_UNSET
    assert codes["call leasehold.v1.WorkloadService/GetWorkload"] == Status.STATUS_CODE_ERROR


@pytest.mark.long
def test_a_refused_call_is_an_error_of_its_span(fleet: Fleet, collector: Collector) -> None:
    assert leasehold(fleet, "suspend", "nothing").returncode == 1
    trace_id = PARENT.split("-")[1]
    fleet.wait(lambda: len(collector.of_trace(trace_id)) >= 2)
    failed = [span for span in collector.of_trace(trace_id) if span.name.endswith("SuspendWorkload")]
    assert {span.status.code for span in failed} == {Status.STATUS_CODE_ERROR}


@pytest.mark.long
def test_nothing_of_opentelemetry_is_imported_without_an_endpoint() -> None:
    code = (
        "import sys\n"
        "import leasehold_worker.agent.daemon, leasehold_coordinator.server.daemon\n"
        "import leasehold_client.coordinator.connection\n"
        "from leasehold_worker import tracing\n"
        "tracing.open_tracing('leasehold-worker', '1')\n"
        "assert tracing.begin('x') is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_extra_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from leasehold_worker import tracing

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    tracing.open_tracing("leasehold-worker", "1")
    assert not tracing.is_on()
    assert "install the wheel of Leasehold with the extra tracing" in caplog.text


@pytest.mark.parametrize("service", ["client", "coordinator", "worker"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "256"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "abc"),
    ],
)
def test_a_variable_that_opentelemetry_refuses_is_one_warning(
    service: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracing = importlib.import_module(f"leasehold_{service}.tracing")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    tracing.open_tracing(*["leasehold", "1"][: 1 if service == "client" else 2])
    assert not tracing.is_on()
    (record,) = (one for one in caplog.records if one.name == f"leasehold_{service}.tracing")
    assert "no traces are exported: OpenTelemetry refuses a variable OTEL_* (" in record.getMessage()


@pytest.mark.parametrize("service", ["client", "coordinator", "worker"])
def test_a_variable_that_opentelemetry_refuses_at_its_import_is_one_warning(service: str) -> None:
    given = "'leasehold'" if service == "client" else "'leasehold', '1'"
    done = subprocess.run(
        [sys.executable, "-c", f"from leasehold_{service} import tracing; tracing.open_tracing({given})"],
        env={
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-4",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("no traces are exported: OpenTelemetry refuses a variable OTEL_* (")


@pytest.mark.parametrize(
    "text", ["", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-xyz", PARENT + "\n", PARENT.upper()]
)
def test_an_invalid_trace_context_counts_as_none(text: str) -> None:
    from leasehold_coordinator import tracing

    assert tracing.valid(text) == ""
    assert tracing.trace_id(text) == ""
    assert tracing.trace_id(PARENT) == PARENT.split("-")[1]
