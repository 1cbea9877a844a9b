"""The grammar of filters, and what they match."""

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from leasehold.v1 import command_pb2, errors_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.command_pb2 import Command
from leasehold.v1.event_pb2 import Event
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec
from leasehold_coordinator.core import permitted_fields
from leasehold_coordinator.core.permitted_fields import restricted
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.lists import list_fields
from leasehold_coordinator.lists.filter_expression import (
    DEPTH_LIMIT,
    LENGTH_LIMIT,
    RESTRICTION_LIMIT,
    And,
    Expression,
    Not,
    Or,
    Restriction,
    parse_filter,
    restrictions,
)
from leasehold_coordinator.lists.filters import bind, bind_fleet, matches, matches_fleet, references

from tests.examples import PATIENT


def a_workload() -> Workload:
    made = Workload(workload_id="w-1", name="train-7", worker_id="k-1", user="ann")
    made.status.state = workload_pb2.WORKLOAD_STATE_RUNNING
    made.status.lease.gpu_uuids.append("GPU-1")
    made.labels.update({"team": "vision", "example.com/tier": "gold", "empty": ""})
    made.spec.environment["TOKEN"] = "secret"
    made.spec.resources.gpu_count = 2
    made.spec.resources.gpu_name = "NVIDIA H100"
    made.create_time.FromJsonString("2026-01-31T08:00:00.5Z")
    return made


def matches_workload(text: str) -> bool:
    return matches(bind(parse_filter(text), list_fields.WORKLOADS), a_workload())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "state = RUNNING",
        "state = running",
        "state = WORKLOAD_STATE_RUNNING",
        'state="RUNNING"',
        "state != EXITED",
        "NOT state = EXITED",
        "NOT (state = EXITED OR state = FAILED)",
        "name = train-7",
        "name : TRAIN",
        'name:"n-7"',
        "workload = w-1 AND workload = train-7",
        "worker = k-1",
        "labels.team = vision",
        "labels.team = 'vision'",
        "labels.team : vis",
        'labels."example.com/tier" = gold',
        "labels.empty = ''",
        "labels:team",
        "labels:*",
        "labels.team:*",
        "NOT labels.owner = ann",
        "gpu_count = 2 AND gpu_count >= 2 AND gpu_count < 3 AND gpu_count > -1 AND gpu_count <= 2",
        "gpu_name : h100",
        "gpu_uuids:GPU-1",
        "ready = false",
        "create_time:* AND NOT end_time:*",
        "create_time > 2026-01-31T08:00:00Z",
        'create_time < "2026-01-31T09:00:01+01:00"',
        "create_time = 2026-01-31T08:00:00.500Z",
        "NOT end_time < 2026-01-31T08:00:00Z",
        # OR binds tighter than AND.
        "name = x OR state = RUNNING AND name = x OR user = ann",
        "(name = other AND name = other) OR state = RUNNING",
    ],
)
def test_a_filter_that_matches(text: str) -> None:
    assert matches_workload(text)


@pytest.mark.parametrize(
    "text",
    [
        "state = EXITED",
        "state != RUNNING",
        "NOT state = RUNNING",
        "name = Train-7",
        "name = train",
        "name : eval",
        "worker != k-1",
        "worker = k",
        "labels.team = sound",
        "labels.owner = ann",
        # A field without a value matches no comparison.
        "labels.owner != ann",
        "end_time > 2020-01-01T00:00:00Z",
        "end_time != 2020-01-01T00:00:00Z",
        "labels:owner",
        'labels:"te"',
        "gpu_uuids:GPU",
        "ready = true",
        "end_time:*",
        'name:"*"',
        # OR binds tighter than AND: this is `state = EXITED AND (... OR ...)`.
        "state = EXITED AND name = x OR state = RUNNING",
    ],
)
def test_a_filter_that_does_not_match(text: str) -> None:
    assert not matches_workload(text)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("stat = RUNNING", "character 1: no field is named 'stat': use one of create_time, end_time,"),
        ("environment.TOKEN = secret", "character 1: no field is named 'environment'"),
        ("name = a AND state = RUN", "character 22: state can't be 'RUN': write one of PENDING, RUNNING,"),
        ("state = UNSPECIFIED", "character 9: state can't be 'UNSPECIFIED'"),
        ("state < RUNNING", "character 1: state can't be compared by <: use = !=, or state:*"),
        ("state.x = RUNNING", "character 1: state has no parts: leave out .x"),
        ("labels = x", "character 1: labels = compares all labels: name one, as labels.KEY = VALUE"),
        ("labels.a.b = x", 'character 1: several keys follow labels: quote one with dots, as labels."a.b"'),
        ("labels.= x", "character 8: '=' where a key is expected: write it in quotes"),
        ("gpu_count = two", "character 13: gpu_count can't be 'two': write an integer"),
        ("gpu_count = 9223372036854775808", "character 13: the number has more than 64 bits"),
        ("gpu_count : 2", "character 1: gpu_count can't be compared by :"),
        ("worker : k", "character 1: worker can't be compared by :"),
        ("gpu_uuids = GPU-1", "character 1: gpu_uuids can't be compared by ="),
        ("ready = yes", "character 9: ready can't be 'yes': write true or false"),
        ("create_time > 2026-01-31", "character 15: .* write a time and its zone, as 2026-01-31T08:00:00Z"),
        ("create_time > 2026-01-31T08:00:00", "character 15: .* write a time and its zone"),
        (
            "create_time > 0001-01-01T00:00:00Z",
            "character 15: .* write a time between the years 1678 and 2262",
        ),
        ("RUNNING", "character 8: nothing after the field 'RUNNING': write one of"),
        ("state RUNNING", "character 7: 'RUNNING' after the field 'state': write one of"),
        ("state =", "character 8: nothing where a value is expected after '='"),
        ("state = AND name = x", "character 9: 'AND' where a value is expected after '='"),
        (
            "state = RUNNING name = x",
            "character 17: 'name' follows a condition: join conditions with AND or OR",
        ),
        ("state = RUNNING AND", "character 20: nothing where a field is expected"),
        ("state = RUNNING and name = x", "character 17: 'and' is no operator: write AND in capitals"),
        ("-state = RUNNING", "character 1: '-state' where a field is expected"),
        ("(state = RUNNING", r"character 17: nothing where '\)' closes the '\(' of character 1: add '\)'"),
        ("state = RUNNING)", r"character 16: '\)' follows a condition"),
        ('name = "x', 'character 8: the string has no end: close it with "'),
        ("name = a=b", "character 9: '=b' follows a condition"),
        ("(" * (DEPTH_LIMIT + 1) + "name = x" + ")" * (DEPTH_LIMIT + 1), "more than 16 parentheses"),
        (" OR ".join(["name = x"] * (RESTRICTION_LIMIT + 1)), "character 601: more than 50 comparisons"),
        ("name = " + "x" * LENGTH_LIMIT, "a filter of 2055 characters is too long: 2048 fit"),
    ],
)
def test_a_refused_filter_names_position_rule_and_remedy(text: str, refusal: str) -> None:
    with pytest.raises(FleetError, match=refusal) as error:
        matches_workload(text)
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    assert error.value.metadata["field"] == "filter"


def test_a_filter_may_have_as_many_comparisons_as_the_limit() -> None:
    assert matches_workload(" OR ".join(["name = train-7"] * RESTRICTION_LIMIT))


def test_parentheses_may_be_as_deep_as_the_limit() -> None:
    assert matches_workload("(" * DEPTH_LIMIT + "name = train-7" + ")" * DEPTH_LIMIT)


def test_names_of_other_entries_are_looked_up_before() -> None:
    expression = parse_filter("workload = train OR worker = alpha OR NOT worker = k-9")
    assert references(expression, list_fields.COMMANDS) == {
        ("workload", "train"),
        ("worker", "alpha"),
        ("worker", "k-9"),
    }
    wanted = bind(
        parse_filter("workload = train"),
        list_fields.COMMANDS,
        {("workload", "train"): frozenset({"w-1", "w-2"})},
    )
    assert matches(wanted, Command(workload_id="w-2"))
    assert not matches(wanted, Command(workload_id="w-3"))
    assert not matches(wanted, Command(workload_id="train"))
    other = bind(parse_filter("workload != w-1"), list_fields.COMMANDS)
    assert [matches(other, Command(workload_id=one)) for one in ("w-1", "w-2", "")] == [False, True, False]


def test_one_filter_for_workers_and_gpus() -> None:
    worker = Worker(
        worker_id="k-1", name="alpha", state=worker_pb2.WORKER_STATE_CONNECTED, labels={"rack": "r1"}
    )
    gpu = FleetGpu(worker_id="k-1", worker_name="alpha")
    gpu.gpu.name = "NVIDIA H100"
    gpu.lease.state = lease_pb2.SLOT_STATE_FREE

    def both(text: str) -> tuple[bool, bool]:
        wanted = bind_fleet(parse_filter(text), list_fields.WORKERS, list_fields.GPUS)
        return matches_fleet(wanted, worker), matches_fleet(wanted, gpu)

    assert both("") == (True, True)
    assert both("worker = alpha") == (True, True)
    assert both("labels.rack = r1") == (True, False)
    assert both("gpu_name:H100") == (False, True)
    assert both("state = CONNECTED") == (True, False)
    assert both("state = FREE") == (False, True)
    assert both("NOT state = LOST") == (True, True)
    for text, match in (
        ("state = BUSY", "character 9: state can't be 'BUSY'"),
        ("gpu = x", "capabilities, .* uuid"),
    ):
        with pytest.raises(FleetError, match=match):
            both(text)


@pytest.mark.parametrize("field", ["gpu_count", "priority"])
@pytest.mark.parametrize("comparison", ["= 0", "!= 7", "< 7", ":*"])
def test_a_hidden_number_matches_no_comparison(field: str, comparison: str) -> None:
    wanted = bind(parse_filter(f"{field} {comparison}"), list_fields.WORKLOADS)
    assert not matches(wanted, restricted(a_workload(), permitted_fields.WORKLOAD))
    assert matches(wanted, Workload(spec=WorkloadSpec()))


def test_each_field_can_be_named() -> None:
    """A field that no message has would match nothing, and nobody would notice."""
    lists: list[Any] = [
        (list_fields.WORKERS, Worker()),
        (list_fields.GPUS, FleetGpu()),
        (list_fields.WORKLOADS, Workload()),
        (list_fields.COMMANDS, Command()),
        (list_fields.EVENTS, Event()),
        (list_fields.CHECKPOINTS, Checkpoint()),
    ]
    for fields, empty in lists:
        for name in fields:
            assert matches(bind(parse_filter(f"{name}:* OR NOT {name}:*"), fields), empty)


NAMES = st.sampled_from(["state", "name", "labels", "x_1"])
KEYS = st.lists(st.text(min_size=1, max_size=8), max_size=2)
VALUES = st.text(max_size=12)


@st.composite
def restriction_texts(draw: st.DrawFn) -> tuple[str, Restriction]:
    """A restriction as a client writes it, and as it is read."""
    name, keys, value = draw(NAMES), draw(KEYS), draw(VALUES)
    comparator = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">=", ":"]))
    space = draw(st.sampled_from(["", " ", "\n\t"]))
    left = ".".join([name, *(quoted(draw, key) for key in keys)])
    text = f"{left}{space}{comparator}{space}{quoted(draw, value)}"
    return text, Restriction(name, tuple(keys), comparator, value, False, 0, 0)


def quoted(draw: st.DrawFn, text: str) -> str:
    if (
        re.fullmatch(r"[A-Za-z0-9]+", text)
        and text.upper() not in ("AND", "OR", "NOT")
        and draw(st.booleans())
    ):
        return text
    quote = draw(st.sampled_from("\"'"))
    return quote + re.sub(rf"[\\{quote}]", lambda found: "\\" + found[0], text) + quote


def combined(parts: st.SearchStrategy[tuple[str, Expression]]) -> st.SearchStrategy[tuple[str, Expression]]:
    several = st.lists(parts, min_size=2, max_size=3)
    return st.one_of(
        parts.map(lambda one: (f"NOT ({one[0]})", Not(one[1]))),
        several.map(
            lambda some: (" AND ".join(f"({text})" for text, _ in some), And(tuple(part for _, part in some)))
        ),
        several.map(
            lambda some: (" OR ".join(f"({text})" for text, _ in some), Or(tuple(part for _, part in some)))
        ),
    )


def bare(expression: Expression) -> Expression:
    """An expression without positions."""
    match expression:
        case Restriction():
            return Restriction(
                expression.field, expression.keys, expression.comparator, expression.value, False, 0, 0
            )
        case Not(part):
            return Not(bare(part))
        case And(parts):
            return And(tuple(map(bare, parts)))
        case Or(parts):
            return Or(tuple(map(bare, parts)))


def depth(expression: Expression) -> int:
    """Parentheses within each other, as :func:`combined` writes them."""
    match expression:
        case Restriction():
            return 0
        case Not(part):
            return 1 + depth(part)
        case And(parts) | Or(parts):
            return 1 + max(map(depth, parts))


@PATIENT
@given(st.recursive(restriction_texts(), combined, max_leaves=6))
def test_what_is_written_is_what_is_read(case: tuple[str, Expression]) -> None:
    text, expected = case
    assume(len(text) <= LENGTH_LIMIT and depth(expected) <= DEPTH_LIMIT)
    found = parse_filter(text)
    assert found is not None
    assert bare(found) == bare(expected)


TOKENS = [
    "AND",
    "OR",
    "NOT",
    "(",
    ")",
    "state",
    "labels",
    ".",
    "=",
    "!=",
    ":",
    "<",
    '"',
    "'",
    "\\",
    "*",
    " ",
    "RUNNING",
]


@settings(PATIENT, max_examples=300)
@given(
    st.one_of(
        st.text(),
        st.lists(st.sampled_from(TOKENS), max_size=12).map("".join),
        st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join),
    )
)
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        expression = parse_filter(text)
        if expression is not None:
            assert all(one.position >= 1 for one in restrictions(expression))
        matches(bind(expression, list_fields.WORKLOADS), a_workload())
    except FleetError as error:
        facts = (error.reason, error.metadata["field"])
    else:
        return
    assert facts == (errors_pb2.ERROR_REASON_INVALID_ARGUMENT, "filter")


def test_operations_and_reasons_are_words_of_the_api() -> None:
    failed = Command(state=command_pb2.COMMAND_STATE_FAILED)
    failed.operation.suspend.SetInParent()
    failed.error.reason = errors_pb2.ERROR_REASON_NO_FREE_GPU
    wanted = bind(parse_filter("operation = suspend AND reason = NO_FREE_GPU"), list_fields.COMMANDS)
    assert matches(wanted, failed)
    assert not matches(wanted, Command())
