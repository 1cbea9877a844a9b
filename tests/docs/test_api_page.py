"""docs/api.md: its examples are filters, and its tables have the fields that there are."""

import re
from pathlib import Path
from typing import Any

import pytest
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.filter_expression import parse_filter
from leasehold_coordinator.lists.filters import bind

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()

FIELDS: dict[str, Any] = {
    "ListWorkers": list_fields.WORKERS,
    "ListGpus": list_fields.GPUS,
    "ListWorkloads": list_fields.WORKLOADS,
    "ListCommands": list_fields.COMMANDS,
    "ListEvents": list_fields.EVENTS,
    "ListAuditEntries": list_fields.AUDIT,
    "ListCheckpoints": list_fields.CHECKPOINTS,
}

ORDERS: dict[str, Any] = {
    "ListWorkers": list_orders.WORKERS,
    "ListGpus": list_orders.GPUS,
    "ListWorkloads": list_orders.WORKLOADS,
    "ListCommands": list_orders.COMMANDS,
    "ListEvents": list_orders.EVENTS,
    "ListAuditEntries": list_orders.AUDIT,
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table with this heading."""
    _, _, table = PAGE.partition(f"{heading}\n|---")
    lines = table.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


EXAMPLES = [(row[0], row[1].strip("`")) for row in rows("| List | Filter | Lists |")]


def test_each_list_has_an_example() -> None:
    assert {name for name, _ in EXAMPLES} == set(FIELDS)


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
def test_an_example_is_a_filter(name: str, text: str) -> None:
    assert bind(parse_filter(text), FIELDS[name]).condition is not None


def test_the_tables_have_all_fields() -> None:
    told = {row[0]: re.findall(r"`(\w+)`", row[1]) for row in rows("| List | Fields |")}
    assert told == {name: list(fields) for name, fields in FIELDS.items()}
    sorts = {row[0]: re.findall(r"`(\w+)`", row[1]) for row in rows("| List | Fields | Default |")}
    assert sorts == {name: list(orders.fields) for name, orders in ORDERS.items()}


@pytest.mark.parametrize("row", rows("| List | Fields | Default |"), ids=lambda row: row[0])
def test_the_default_order_can_be_written(row: list[str]) -> None:
    name, _, default = row
    written = ORDERS[name].parse(default.strip("`| "))
    real = ORDERS[name].parse("")
    told = [(key.name, key.is_descending) for key in written.keys]
    assert [one for one in told if one in [(key.name, key.is_descending) for key in real.keys]] == told
