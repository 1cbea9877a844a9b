"""Checkpoints on the command line: made, listed and planned."""

import json
from typing import Any

import grpc
import pytest
from leasehold.v1 import (
    checkpoint_pb2,
    operation_pb2,
    workload_pb2,
    workload_service_pb2,
)
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.plan_pb2 import TIER_DEVICE, TIER_DISK, TIER_HOST, DestinationPlan, Plan, TierPlan
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec, WorkloadStatus
from leasehold_client.arguments.policies import make_policy

from tests.client.checkpoints import GIB, MADE, done_command, serve, watched
from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, ScriptedCoordinator


def test_a_checkpoint_is_made_and_told(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    made = done_command(
        Operation(checkpoint=operation_pb2.CheckpointOperation()), checkpoint_id="k-2", disk_bytes=3 * GIB
    )
    scripted.answers["CheckpointWorkload"] = lambda request, context: (
        workload_service_pb2.CheckpointWorkloadResponse(command=made)
    )
    watched(scripted, made)
    done = leasehold("checkpoint", "one", "--timeout", "9")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "one: checkpoint done in 2.00 s",
        "  checkpoint k-2",
        "  3.0 GiB on disk",
    ]
    [request] = scripted.asked(workload_service_pb2.CheckpointWorkloadRequest)
    assert (request.workload, request.timeout.seconds) == ("one", 9)
    assert request.request_id


def test_what_was_parked_tells_how(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    parked = done_command(
        Operation(suspend=operation_pb2.SuspendOperation()),
        policy=make_policy("offload", "stop"),
        checkpoint_id="k-2",
        released_gpu_uuids=[A],
    )
    scripted.plays(parked)
    assert leasehold("suspend", "one").stdout.splitlines()[1:] == [
        "  policy offload+stop",
        "  checkpoint k-2",
        "  released alpha/0",
    ]


def test_checkpoints_are_listed(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    serve(scripted, *MADE)
    done = leasehold("get", "checkpoints", "--columns", "id,kind,workload,worker,size,created,in-use")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ID   KIND         WORKLOAD   WORKER  SIZE     CREATED               IN USE",
        "k-2  application  one        alpha   3.0 GiB  2023-11-14T22:13:20Z  yes",
        "k-1  unspecified  id-of-two  w-9     0 B      -                     -",
        "k-0  image                   alpha   0 B      -                     -",
    ]
    done = leasehold("get", "checkpoints", "one", "-o", "json")
    [document, *_] = json.loads(done.stdout)["checkpoints"]
    assert document["checkpoint_id"] == "k-2"
    assert document["size_bytes"] == str(3 * GIB)
    assert [request.workload for request in scripted.asked(workload_service_pb2.ListCheckpointsRequest)] == [
        "",
        "one",
    ]


def test_workers_that_did_not_answer_are_named(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    serve(scripted, MADE[0], unreachable=("w-2", "w-3"))
    done = leasehold("get", "checkpoints", "-o", "json")
    assert (done.code, len(json.loads(done.stdout)["checkpoints"])) == (0, 1)
    assert done.stderr == (
        "leasehold: warning: these workers did not answer, so their checkpoints are unknown: beta, w-3\n"
    )


def test_a_list_without_older_ones_says_so(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    serve(scripted, MADE[0])
    whole = scripted.answers["ListCheckpoints"]

    def cut(request: Any, context: grpc.ServicerContext) -> workload_service_pb2.ListCheckpointsResponse:
        response: workload_service_pb2.ListCheckpointsResponse = whole(request, context)
        response.truncated = True
        return response

    scripted.answers["ListCheckpoints"] = cut
    assert "the oldest are unknown: `leasehold get checkpoints W" in leasehold("get", "checkpoints").stderr
    assert leasehold("get", "checkpoints", "one").stderr.endswith("the oldest are unknown\n")


def test_what_is_damaged_says_so(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    damaged = Checkpoint(
        checkpoint_id="k-6", kind=checkpoint_pb2.CHECKPOINT_KIND_IMAGE, worker_id="w-1", problem="no header"
    )
    serve(scripted, damaged)
    assert "k-6  image, damaged " in leasehold("get", "checkpoints").stdout
    assert json.loads(leasehold("get", "checkpoints", "-o", "json").stdout)["checkpoints"][0]["problem"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("rm checkpoint", "name either checkpoints, or --all"),
        ("rm workload", "name a workload, or choose some by -l, --filter or --all"),
        ("checkpoint", "name a workload, or choose some by -l, --filter or --all"),
        ("wake one --to gamma/0", "no GPU is at 'gamma/0'"),
    ],
)
def test_bad_usage(leasehold: CommandLine, arguments: str, match: str) -> None:
    done = leasehold(*arguments.split())
    assert (done.code, done.stdout) == (2, "")
    assert match in done.stderr


def test_a_plan_tells_its_policy_steps_and_tiers(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    plan = Plan(
        policy=make_policy("offload", "keep_running", "checkpoint"),
        steps=["hook weights: vLLM sleeps at level 1", "the memory\nis looked at"],
        tiers=[
            TierPlan(tier=TIER_DEVICE, needed_bytes=GIB),
            TierPlan(tier=TIER_HOST, needed_bytes=4 * GIB, available_bytes=60 * GIB),
            TierPlan(tier=TIER_DISK, needed_bytes=2 * GIB),
        ],
    )
    scripted.answers["Plan"] = lambda request, context: workload_service_pb2.PlanResponse(plan=plan)
    done = leasehold("checkpoint", "one", "--dry-run")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "one: checkpoint would move 6.0 GiB",
        "  policy offload+keep_running, up to checkpoint",
        "  1. hook weights: vLLM sleeps at level 1",
        "  2. the memory is looked at",
        "  in device memory  1.0 GiB needed",
        "  in host memory    4.0 GiB needed  60.0 GiB available",
        "  on disk           2.0 GiB needed",
    ]
    [request] = scripted.asked(workload_service_pb2.PlanRequest)
    assert request.checkpoint == operation_pb2.CheckpointOperation()
    plan.tiers[2].ClearField("needed_bytes")
    assert leasehold("suspend", "one", "--dry-run").stdout.splitlines()[0] == "one: suspend would start"
    plan.destinations.append(DestinationPlan(gpu_uuid=A, needed_bytes=GIB))
    assert "would move 1.0 GiB; it takes alpha/0" in leasehold("wake", "one", "--dry-run").stdout


def test_parked_workloads_tell_how_and_where(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    sleeping = Workload(
        name="one",
        spec=WorkloadSpec(eviction=make_policy("offload", "keep_running", "stop")),
        status=WorkloadStatus(
            state=workload_pb2.WORKLOAD_STATE_SLEEPING,
            parked_by=make_policy("discard", "keep_running"),
            yielded=True,
        ),
    )
    image = Workload(
        name="two",
        spec=WorkloadSpec(),
        status=WorkloadStatus(
            state=workload_pb2.WORKLOAD_STATE_CHECKPOINTED, parked_bytes=GIB, disk_bytes=2 * GIB
        ),
    )
    stopped = Workload(
        name="three",
        spec=WorkloadSpec(eviction=make_policy(process="stop")),
        status=WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_STOPPED, disk_bytes=GIB),
    )
    listed = [sleeping, image, stopped]
    scripted.answers["ListWorkloads"] = lambda request, context: workload_service_pb2.ListWorkloadsResponse(
        workloads=listed
    )
    lines = leasehold("get", "workloads", "--columns", "name,state,gpus,parked,eviction").stdout.splitlines()
    assert lines == [
        "NAME   STATE              GPUS  PARKED                    EVICTION",
        "one    SLEEPING(yielded)  -     -                         discard+keep_running",
        "two    CHECKPOINTED       -     1.0 GiB, 2.0 GiB on disk  -",
        "three  STOPPED            -     1.0 GiB on disk           retain+stop",
    ]
