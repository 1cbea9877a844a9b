"""The options that say how workloads give up their GPUs."""

import json
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, workload_pb2, workload_service_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold_client.arguments.policies import PROCESSES, WEIGHTS, make_policy

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, command, workload

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
KEEP, CUDA, IMAGE, STOP = PROCESSES.values()
RETAIN, OFFLOAD, DISCARD = WEIGHTS.values()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("", None),
        ("--weights offload", EvictionPolicy(weight_strategy=OFFLOAD, process_strategy=CUDA)),
        ("--process stop", EvictionPolicy(weight_strategy=RETAIN, process_strategy=STOP)),
        (
            "--weights discard --process keep_running --escalate-to checkpoint",
            EvictionPolicy(weight_strategy=DISCARD, process_strategy=KEEP, escalate_to=IMAGE),
        ),
    ],
)
def test_suspend_says_how_only_where_it_is_told(
    leasehold: CommandLine, scripted: ScriptedCoordinator, options: str, wanted: EvictionPolicy | None
) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["Plan"] = lambda request, context: workload_service_pb2.PlanResponse()
    assert leasehold("suspend", "one", *options.split()).code == 0
    assert leasehold("suspend", "one", "--dry-run", "--force", *options.split()).code == 0
    [request] = scripted.asked(workload_service_pb2.SuspendWorkloadRequest)
    [plan] = scripted.asked(workload_service_pb2.PlanRequest)
    for operation in (request.operation, plan.suspend):
        assert operation.HasField("policy") == (wanted is not None)
        assert operation.policy == (wanted or EvictionPolicy())
    assert (request.operation.force, plan.suspend.force) == (False, True)


HOOKS = [
    {"name": "weights", "vllm": {"url": "http://127.0.0.1:8000", "wake_tags": ["weights"]}, "timeout": "60s"},
    {
        "name": "note",
        "phase": "HOOK_PHASE_BEFORE_SUSPEND",
        "command": {"arguments": ["note", "{workload}"]},
        "weight_strategies": ["WEIGHT_STRATEGY_OFFLOAD"],
    },
]


def test_run_says_how_a_workload_gives_up_its_gpus(
    leasehold: CommandLine, scripted: ScriptedCoordinator, tmp_path: Path
) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["CreateWorkload"] = lambda request, context: workload_service_pb2.CreateWorkloadResponse(
        workload=workload(), command=command(SUCCEEDED)
    )
    hooks = tmp_path / "hooks.json"
    hooks.write_text(json.dumps(HOOKS))
    options = ["--evict", "offload", "--escalate-to", "stop", "--hooks", str(hooks)]
    options += ["--keep-checkpoints", "7", "--from-checkpoint", "k-1"]
    assert leasehold("run", *options, "--", "serve").code == 0
    assert leasehold("run", "--escalate-to", "checkpoint", "--", "serve").code == 0
    assert leasehold("run", "--", "serve").code == 0
    first, second, third = scripted.asked(workload_service_pb2.CreateWorkloadRequest)
    assert first.spec.eviction == make_policy("offload", "cuda_suspend", "stop")
    assert [hook.name for hook in first.spec.hooks] == ["weights", "note"]
    assert first.spec.hooks[0].timeout.seconds == 60
    assert list(first.spec.hooks[1].weight_strategies) == [OFFLOAD]
    assert (first.spec.keep_checkpoints, first.checkpoint_id) == (7, "k-1")
    assert second.spec.eviction == make_policy(escalate_to="checkpoint")
    assert third.spec == workload_pb2.WorkloadSpec(arguments=["serve"], resources=third.spec.resources)
    assert not third.checkpoint_id


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("suspend one --weights drop", "'drop' is not one of 'retain', 'offload', 'discard'"),
        ("suspend one --process suspend", "'suspend' is not one of 'keep_running', 'cuda_suspend'"),
        ("suspend one --escalate-to stop", "give --process or --weights too: see `leasehold suspend --help`"),
        ("suspend one --process stop --escalate-to checkpoint", "checkpoint is weaker than stop"),
        ("run --evict drop -- true", "'drop' is not an eviction policy: write WEIGHTS+PROCESS"),
        ("run --evict offload+suspend -- true", "'suspend' is not a process strategy: write keep_running"),
        ("run --evict stop --escalate-to cuda_suspend -- true", "cuda_suspend is weaker than stop"),
        ("run --escalate-to keep_running -- true", "keep_running is weaker than cuda_suspend"),
        ("run --keep-checkpoints 0 -- true", "0 is not in the range"),
        ("run --keep-checkpoints 1001 -- true", "1001 is not in the range"),
    ],
)
def test_bad_usage(leasehold: CommandLine, scripted: ScriptedCoordinator, arguments: str, match: str) -> None:
    done = leasehold(*arguments.split())
    assert (done.code, done.stdout) == (2, "")
    assert match in done.stderr
    assert done.stderr.startswith("leasehold: ")
    assert done.stderr.count("\n") == 1
    assert not scripted.requests
