"""What operations with holds and preempts must obey."""

import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1.command_pb2 import Command
from leasehold.v1.operation_pb2 import (
    Operation,
    ReleaseHoldOperation,
    RestoreOperation,
    RunOperation,
    SuspendOperation,
)
from leasehold_coordinator.command_workloads import workload_ids
from leasehold_coordinator.core.operation_rules import HOLD_LIMIT_S, check_operation
from leasehold_coordinator.errors import FleetError

LIMIT = Duration(seconds=HOLD_LIMIT_S)


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (Operation(suspend=SuspendOperation(hold_for=Duration())), "operation.hold_for"),
        (Operation(suspend=SuspendOperation(hold_for=Duration(seconds=601))), "operation.hold_for"),
        (Operation(suspend=SuspendOperation(held_by="ann")), "operation.held_by"),
        (Operation(suspend=SuspendOperation(hold_for=LIMIT, held_by="x" * 257)), "operation.held_by"),
        (Operation(suspend=SuspendOperation(hold_id="c-1")), "operation.hold_id"),
        (Operation(restore=RestoreOperation(hold_id="c-1", preempt=["w-1"])), "operation.preempt"),
        (Operation(restore=RestoreOperation(preempt=["w-1"] * 257)), "operation.preempt"),
        (Operation(release_hold=ReleaseHoldOperation()), "operation.hold_id"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_its_field(operation: Operation, field: str) -> None:
    with pytest.raises(FleetError) as refused:
        check_operation(operation)
    assert refused.value.metadata["field"] == field


def test_what_obeys_the_rules_is_allowed() -> None:
    check_operation(Operation(suspend=SuspendOperation(hold_for=LIMIT, held_by="ann")))
    check_operation(Operation(restore=RestoreOperation(preempt=["w-1"])))
    check_operation(Operation(release_hold=ReleaseHoldOperation(hold_id="c-1")))


def test_a_command_is_about_those_that_it_preempts_too() -> None:
    run = Operation(run=RunOperation(preempt=["w-1", "w-2"]))
    assert workload_ids(Command(workload_id="w-3", operation=run)) == ["w-3", "w-1", "w-2"]
    restore = Operation(restore=RestoreOperation(preempt=["w-1"]))
    assert workload_ids(Command(workload_id="w-3", operation=restore)) == ["w-3", "w-1"]
