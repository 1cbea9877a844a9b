"""docs/metrics.md lists every metric of both daemons, each alert, and the bounds of labels."""

import re
from pathlib import Path
from typing import Final

import pytest
import yaml
from leasehold.v1 import command_pb2, gpu_pb2, lease_pb2, operation_pb2, worker_pb2, workload_pb2
from leasehold_coordinator.server import fleet_gauges, metrics_listener, metrics_request
from leasehold_worker.agent import gauges

from tests.metric_tables import MetricEntry, coordinator_metrics, worker_metrics

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs/metrics.md").read_text()


def listed(section: str) -> list[MetricEntry]:
    """The metrics of a section's table."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return [
        MetricEntry(name, kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in rows
    ]


@pytest.mark.parametrize(
    ("section", "metrics"),
    [("The worker", worker_metrics()), ("The coordinator", coordinator_metrics())],
    ids=["worker", "coordinator"],
)
def test_the_page_lists_every_metric(section: str, metrics: list[MetricEntry]) -> None:
    assert listed(section) == metrics


def test_names_follow_the_rules_and_no_daemon_has_those_of_the_other() -> None:
    ours, theirs = worker_metrics(), coordinator_metrics()
    assert not {metric.name for metric in ours} & {metric.name for metric in theirs}
    for metric in ours:
        assert re.match("leasehold_(worker|gpu)_", metric.name)
    for metric in theirs:
        assert re.match("leasehold_(coordinator|fleet)_", metric.name)
    for metric in (*ours, *theirs):
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_every_label_has_a_bound() -> None:
    table = PAGE.partition("\n## Labels\n")[2].partition("\n## ")[0]
    bounded = set(re.findall(r"`([a-zA-Z_]+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    used = {label for metric in (*worker_metrics(), *coordinator_metrics()) for label in metric.labels}
    assert used <= bounded


def test_the_bounds_are_those_of_the_protos() -> None:
    def bound(label: str) -> str:
        found = re.search(rf"^\| {re.escape(label)} \| .* \| (.*?) \|$", PAGE, re.MULTILINE)
        assert found, label
        return found[1]

    states = len(lease_pb2.SlotState.values()) - 1
    assert len(gauges.SLOT_STATES) == states
    assert bound("`state` of `leasehold_gpu_lease_state`, `leasehold_fleet_gpus`") == str(states + 1)
    assert bound("`state` of workloads") == str(len(gauges.WORKLOAD_STATES) + 1)
    assert len(gauges.WORKLOAD_STATES) == len(workload_pb2.WorkloadState.values()) - 1 - 3
    members = len(workload_pb2.MemberState.values()) - 1
    assert bound("`state` of members, workers, commands") == f"{members}, 5, 5"
    names = [name.removeprefix("WORKER_STATE_") for name in worker_pb2.WorkerState.keys()[1:]]
    assert sorted(fleet_gauges.WORKER_STATES) == sorted(names)
    commands = [name.removeprefix("COMMAND_STATE_") for name in command_pb2.CommandState.keys()[1:]]
    assert set(fleet_gauges.COMMAND_STATES) < set(commands)
    assert bound("`health`") == str(len(gpu_pb2.GpuHealth.values()) - 1)
    verbs = operation_pb2.Operation.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert bound("`verb`") == str(len(verbs) + 1)


def test_the_page_lists_every_alert() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/leasehold.rules.yml").read_text())["groups"]
    section = PAGE.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"\b(Leasehold[A-Z]\w+)", section))
    assert named == {rule["alert"] for rule in group["rules"]}


def test_the_bounds_of_the_port_are_those_of_the_code() -> None:
    assert f"a port {metrics_listener.CONNECTIONS} connections" in PAGE
    assert f"at most {metrics_listener.REQUEST_TIMEOUT_S:g} s" in PAGE
    assert f"at most {metrics_request.HEAD_LIMIT_BYTES // 1024} KiB" in PAGE
