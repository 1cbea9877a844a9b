"""Scrapes of the daemons' metrics, as Prometheus makes them, and Prometheus's own opinion of them."""

import http.client
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

TIMEOUT_S: Final = 60.0
OPENMETRICS: Final = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@dataclass(frozen=True)
class Scrape:
    """The answer to a scrape."""

    families: list[Metric]

    def value(self, name: str, **labels: str) -> float | None:
        """The value of a sample with these labels, among others. None: there is none. Several are added."""
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    def series(self) -> int:
        """Number of samples."""
        return sum(len(family.samples) for family in self.families)


def request(
    address: str,
    method: str = "GET",
    path: str = "/metrics",
    accept: str = "",
    tls: ssl.SSLContext | None = None,
) -> tuple[int, str, str]:
    """The status, the content type and the body of an answer."""
    host, _, port = address.rpartition(":")
    if tls is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_S, context=tls)
    try:
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def scrape(address: str, tls: ssl.SSLContext | None = None) -> Scrape:
    """A scrape in OpenMetrics."""
    status, content_type, body = request(address, accept=OPENMETRICS, tls=tls)
    assert status == 200, body
    assert content_type.startswith("application/openmetrics-text"), content_type
    return Scrape(list(parse_openmetrics(body)))  # type: ignore[no-untyped-call]


def scrape_text(address: str) -> str:
    """A scrape in the text format of Prometheus, which promtool reads."""
    status, content_type, body = request(address)
    assert status == 200, body
    assert content_type.startswith("text/plain"), content_type
    assert list(parse_text(body))
    return body


def wait_for(address: str, wanted: Callable[[Scrape], bool], tls: ssl.SSLContext | None = None) -> Scrape:
    """Scrapes until a scrape is as wanted, and returns it. The daemon may just start."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            found = scrape(address, tls)
            if wanted(found):
                return found
        except (TimeoutError, ConnectionError):
            pass
        assert time.monotonic() < deadline, "no scrape is as wanted"
        time.sleep(0.05)


def promtool(*arguments: str, text: str | None = None) -> str:
    """The output of promtool, which must succeed. Skips the test on a machine without promtool."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing: install the Debian package prometheus")
    run = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}"
    return run.stdout + run.stderr
