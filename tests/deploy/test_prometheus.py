"""The alert rules and the dashboard: valid for Prometheus, and about metrics that exist."""

import re
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pytest
import yaml

from tests.metric_tables import coordinator_metrics, worker_metrics
from tests.scrapes import promtool

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
RULES: Final = DEPLOY / "prometheus/leasehold.rules.yml"
RULES_TEST: Final = DEPLOY / "prometheus/leasehold.rules_test.yml"
DASHBOARD: Final = DEPLOY / "grafana/leasehold.json"
SERIES: Final = frozenset().union(*(metric.series for metric in (*worker_metrics(), *coordinator_metrics())))
LABELS: Final = {label for metric in (*worker_metrics(), *coordinator_metrics()) for label in metric.labels}


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A part of Grafana's dashboard schema, version 39: the fields that the dashboard uses, and no others."""


class Grid(Strict):
    h: int
    w: int
    x: int
    y: int


class Source(Strict):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Target(Strict):
    refId: str
    datasource: Source
    expr: str
    legendFormat: str


class Panel(Strict):
    id: int
    type: Literal["row", "stat", "timeseries"]
    title: str
    gridPos: Grid
    description: str = ""
    datasource: Source | None = None
    targets: list[Target] = []
    fieldConfig: dict[str, Any] = {}
    options: dict[str, Any] = {}
    collapsed: bool = False
    panels: list[object] = []


class Variable(Strict):
    name: str
    label: str
    type: Literal["query", "datasource"]
    query: str | dict[str, str]
    refresh: Literal[1, 2]
    current: dict[str, list[str]]
    datasource: Source | None = None
    includeAll: bool = False
    multi: bool = False
    allValue: str = ""
    sort: int = 0


class Variables(Strict):
    list: list[Variable]


class Dashboard(Strict):
    uid: str
    title: str
    description: str
    tags: list[str]
    schemaVersion: Literal[39]
    version: int
    editable: bool
    graphTooltip: int
    refresh: str
    time: dict[str, str]
    timezone: str
    templating: Variables
    annotations: dict[str, list[object]]
    links: list[object]
    panels: list[Panel]


@pytest.fixture(scope="module")
def dashboard() -> Dashboard:
    return msgspec.json.decode(DASHBOARD.read_bytes(), type=Dashboard)


def expressions(dashboard: Dashboard) -> list[str]:
    """The queries of all panels, with the values that Grafana puts in place of variables."""
    found = [target.expr for panel in dashboard.panels for target in panel.targets]
    return [re.sub(r"\$(worker|instance)", ".*", one.replace("$__rate_interval", "5m")) for one in found]


def require_known(text: str) -> None:
    """Checks that each metric of ours in an expression exists, with labels that some metric has."""
    names = re.findall(r"leasehold_\w+", text)
    assert set(names) <= SERIES, set(names) - SERIES
    for selector in re.findall(r"leasehold_\w+\{(.*?)\}", text):
        labels = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector))
        assert labels <= LABELS | {"instance", "job", "le"}, labels


@pytest.mark.long
def test_the_rules_are_valid_and_their_tests_pass() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    promtool("test", "rules", str(RULES_TEST))
    promtool("check", "config", "--syntax-only", str(RULES.with_name("prometheus.yml")))


def test_every_rule_is_about_known_metrics_and_has_a_test() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    fired = {
        case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")
    }
    for rule in group["rules"]:
        require_known(rule["expr"])
        assert rule["alert"] in fired, "a rule needs a test in which it fires"
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        for name in re.findall(r"leasehold_\w+", str(rule["annotations"])):
            assert name in SERIES
    for test in tests:
        for series in test["input_series"]:
            require_known(series["series"])


def test_the_dashboard_has_the_schema(dashboard: Dashboard) -> None:
    ids = [panel.id for panel in dashboard.panels]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in dashboard.panels:
        grid = panel.gridPos
        assert grid.x + grid.w <= 24, panel.title
        mine = {(x, y) for x in range(grid.x, grid.x + grid.w) for y in range(grid.y, grid.y + grid.h)}
        assert not cells & mine, f"{panel.title} covers another panel"
        cells |= mine
        if panel.type != "row":
            assert panel.description, panel.title
            assert panel.targets, panel.title
    names = {variable.name for variable in dashboard.templating.list}
    assert set(re.findall(r"\$\{?([a-z]\w*)", DASHBOARD.read_text())) - {"__rate_interval"} <= names


def test_every_query_of_the_dashboard_is_about_known_metrics(dashboard: Dashboard) -> None:
    for expression in expressions(dashboard):
        require_known(expression)
    for variable in dashboard.templating.list:
        if isinstance(variable.query, dict):
            require_known(variable.query["query"])


def test_prometheus_parses_every_query_of_the_dashboard(dashboard: Dashboard, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query{number}", "expr": expression}
        for number, expression in enumerate(expressions(dashboard))
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


def require_samples(folder: Path, series: dict[str, str], expected: dict[str, list[dict[str, Any]]]) -> None:
    """Lets promtool compare the samples of expressions, after a minute with these series."""
    cases = [
        {"expr": expression, "eval_time": "1m", "exp_samples": samples}
        for expression, samples in expected.items()
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    file = folder / "samples.yml"
    file.write_text(yaml.safe_dump({"tests": [{"input_series": inputs, "promql_expr_test": cases}]}))
    promtool("test", "rules", str(file))


def test_no_panel_has_a_value_while_no_daemon_answers(dashboard: Dashboard, tmp_path: Path) -> None:
    require_samples(tmp_path, {}, {expression: [] for expression in expressions(dashboard)})


@pytest.mark.parametrize(
    ("title", "series"),
    [
        ("Wedged workloads", 'leasehold_coordinator_info{version="0"}'),
        ("GPUs leased", 'leasehold_fleet_gpus{worker="alpha", state="FREE"}'),
    ],
)
def test_a_panel_tells_none_from_unknown(
    dashboard: Dashboard, tmp_path: Path, title: str, series: str
) -> None:
    (panel,) = (panel for panel in dashboard.panels if panel.title == title)
    (target,) = panel.targets
    require_samples(tmp_path, {series: "1 1"}, {target.expr: [{"labels": "{}", "value": 0}]})
