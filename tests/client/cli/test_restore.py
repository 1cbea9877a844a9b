"""The verb that restores, under both of its names."""

import pytest
from leasehold.v1 import (
    operation_pb2,
    workload_service_pb2,
)
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.plan_pb2 import Plan

from tests.client.checkpoints import done_command, serve, watched
from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import B, ScriptedCoordinator


@pytest.mark.parametrize("verb", ["wake", "restore"])
def test_wake_and_restore_are_one(leasehold: CommandLine, scripted: ScriptedCoordinator, verb: str) -> None:
    serve(scripted)
    watched(scripted, done_command(Operation(restore=operation_pb2.RestoreOperation())))
    scripted.answers["Plan"] = lambda request, context: workload_service_pb2.PlanResponse(
        plan=Plan(already_there=True)
    )
    done = leasehold(verb, "one", "--to", "alpha/1", "--checkpoint", "k-1")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == "one: restore done in 2.00 s\n"
    [request] = scripted.asked(workload_service_pb2.RestoreWorkloadRequest)
    wanted = operation_pb2.RestoreOperation(gpu_uuids=[B], checkpoint_id="k-1")
    assert request.operation == wanted
    done = leasehold(verb, "one", "--to", "alpha/1", "--checkpoint", "k-1", "--dry-run")
    assert done.stdout == f"one: {verb} would have nothing to do\n"
    [planned] = scripted.asked(workload_service_pb2.PlanRequest)
    assert planned.restore == wanted
    shown = " ".join(leasehold(verb, "--help").stdout.split())
    assert "`leasehold wake` and `leasehold restore` are the same" in shown
