"""A real Prometheus scrapes a real fleet, and the panels of the dashboard have data."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.integration.fleets import Fleet, make_fleet
from tests.ports import free_port

DASHBOARD: Final = Path(__file__).resolve().parents[2] / "deploy/grafana/leasehold.json"
TIMEOUT_S: Final = 60.0

WITHOUT_DATA: Final = {
    ("Wait of claims", "B"): "no claim of this host waited",
    ("Utilization of leased GPUs", "A"): "there is no dcgm-exporter",
    ("Certificates", "A"): "the worker uses a token",
}
"""Queries that have no data in this test, by panel and letter, with the reasons."""


class Prometheus:
    """A Prometheus that scrapes every second."""

    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The present result of an expression."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(
            f"http://{self._address}/api/v1/query?{query}", timeout=TIMEOUT_S
        ) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result

    def wait(self, expression: str) -> list[dict[str, Any]]:
        """The result of an expression, once there is one."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if found := self.query(expression):
                    return found
            except OSError:
                pass  # it may just start
            assert time.monotonic() < deadline, expression
            time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """A Prometheus with one target for each job."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is missing: install the Debian package prometheus")
    jobs = [{"job_name": name, "static_configs": [{"targets": [target]}]} for name, target in targets.items()]
    config = folder / "prometheus.yml"
    timing = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config.write_text(yaml.safe_dump({"global": timing, "scrape_configs": jobs}))
    address = f"127.0.0.1:{free_port()}"
    options = [
        *(f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log, cwd=folder)
    try:
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


@contextmanager
def scraped_fleet(folder: Path) -> Iterator[tuple[Fleet, Prometheus]]:
    """A fleet with one worker, and the Prometheus that scrapes both."""
    addresses = {f"leasehold-{name}": f"127.0.0.1:{free_port()}" for name in ("coordinator", "worker")}
    with (
        prometheus(folder, addresses) as scraper,
        make_fleet(folder, "--metrics-listen", addresses["leasehold-coordinator"]) as fleet,
    ):
        fleet.start_worker("alpha", settings=f'metrics_listen = "{addresses["leasehold-worker"]}"\n')
        yield fleet, scraper


def use(fleet: Fleet) -> None:
    """Uses each part of a fleet that has a panel."""
    fleet.run_counter("one")
    fleet.cli("suspend", "one")
    fleet.cli("restore", "one", "--to", "alpha/1")
    fleet.cli("remap", "one", "--to", "alpha/2")
    fleet.cli("run", "--name", "three", "--worker", "alpha", "--", "/nonexistent", code=1)
    fleet.run_counter("two")
    fleet.cli("suspend", "two")


@pytest.mark.long
def test_the_panels_of_the_dashboard_have_data(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    with scraped_fleet(tmp_path) as (fleet, scraper):
        scraper.wait('up{job="leasehold-worker"} == 1')
        for _ in range(2):  # a rate needs two values of each counter
            use(fleet)
            scraper.wait('leasehold_worker_workloads{state="SUSPENDED"} == 1')
            for name in ("one", "two"):
                fleet.cli("stop", name)
        use(fleet)
        scraper.wait("leasehold_worker_operation_errors_total > 0")
        for panel in panels:
            for target in panel.get("targets", []):
                expression = re.sub(r"\$(worker|instance)", ".*", target["expr"])
                expression = expression.replace("$__rate_interval", "2m")
                place = panel["title"], target["refId"]
                if place not in WITHOUT_DATA:
                    scraper.wait(expression)
        assert not scraper.query('up{job=~"leasehold-.*"} == 0')
