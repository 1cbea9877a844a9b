"""The table of a workload's states, and the modules that write a workload."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import leasehold_worker
from leasehold.v1.workload_pb2 import WorkloadState
from leasehold_worker.workloads.states import (
    AWAY,
    ENDED,
    IN_OPERATION,
    RUNNING,
    STOPPING,
    TRANSITIONS,
    UNKNOWN,
)
from leasehold_worker.workloads.workload import Workload


def test_each_state_that_a_worker_uses_has_a_row_and_ended_ones_have_none() -> None:
    used = set(WorkloadState.values()) - {0, WorkloadState.Value("WORKLOAD_STATE_PENDING")}
    assert set(TRANSITIONS) | ENDED == used
    assert not ENDED & set(TRANSITIONS)


def test_only_an_operation_ends_the_processes_of_a_workload_that_continues() -> None:
    assert not TRANSITIONS[RUNNING] & AWAY
    for state in AWAY:
        assert TRANSITIONS[state] <= IN_OPERATION | ENDED | {STOPPING, UNKNOWN}


def test_only_this_package_writes_what_a_workload_is() -> None:
    package = Path(leasehold_worker.__file__).parent
    modules = [path for path in package.rglob("*.py") if path.parent.name != "workloads"]
    assert not [place for path in modules for place in writes(path)]


def writes(path: Path) -> Iterator[str]:
    """The places that write an attribute of a workload, by the name of what they write to."""
    names = {field.name for field in dataclasses.fields(Workload)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in names:
            holder = node.value
            if (isinstance(holder, ast.Name) and holder.id == "workload") or (
                isinstance(holder, ast.Attribute) and holder.attr == "workload"
            ):
                yield f"{path}:{node.lineno} writes {ast.unparse(node)}"
