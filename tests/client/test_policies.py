"""Policies in words, and the options and files that say how workloads give up their GPUs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1 import command_pb2, fleet_pb2, workload_pb2
from leasehold.v1.workload_pb2 import EvictionPolicy
from leasehold_client.arguments.hooks_file import read_hooks
from leasehold_client.arguments.policies import PROCESSES, WEIGHTS, make_policy, parse_policy, policy_text
from leasehold_client.errors import UsageError

from .conftest import CommandLine
from .scripted_coordinator import ScriptedCoordinator, command, workload

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
KEEP, CUDA, IMAGE, STOP = PROCESSES.values()
RETAIN, OFFLOAD, DISCARD = WEIGHTS.values()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("offload+cuda_suspend", (OFFLOAD, CUDA)),
        ("discard+keep_running", (DISCARD, KEEP)),
        ("offload", (OFFLOAD, CUDA)),
        ("retain", (RETAIN, CUDA)),
        ("stop", (RETAIN, STOP)),
        ("checkpoint", (RETAIN, IMAGE)),
    ],
)
def test_what_people_write(text: str, wanted: tuple[int, int]) -> None:
    policy = parse_policy(text)
    assert (policy.weight_strategy, policy.process_strategy, policy.escalate_to) == (*wanted, 0)
    assert parse_policy(policy_text(policy)) == policy


def test_the_words_are_those_of_the_wire() -> None:
    for words, kind, prefix in (
        (WEIGHTS, workload_pb2.WeightStrategy, "WEIGHT_STRATEGY_"),
        (PROCESSES, workload_pb2.ProcessStrategy, "PROCESS_STRATEGY_"),
    ):
        assert [prefix + word.upper() for word in words] == kind.keys()[1:]


@pytest.mark.parametrize(
    "text",
    ["", "+", "offload+", "+stop", "cuda_suspend+offload", "Offload", "cuda-suspend", "stop+stop+stop"],
)
def test_what_is_no_policy_names_the_words(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_policy(text)
    assert "retain, offload or discard" in error.value.message or (
        "keep_running, cuda_suspend, checkpoint or stop" in error.value.message
    )


def test_a_ladder_leads_upwards() -> None:
    assert make_policy(process="keep_running", escalate_to="stop").escalate_to == STOP
    assert parse_policy("offload", "cuda_suspend").escalate_to == CUDA
    with pytest.raises(UsageError, match=r"keep_running is weaker than cuda_suspend.*checkpoint or stop$"):
        parse_policy("offload", "keep_running")
    with pytest.raises(UsageError, match=r"checkpoint is weaker than stop.*write stop$"):
        make_policy(process="stop", escalate_to="checkpoint")


def test_what_people_read() -> None:
    newer: Any = 77
    for policy, text in (
        (EvictionPolicy(), "retain+cuda_suspend"),
        (EvictionPolicy(weight_strategy=DISCARD), "discard+cuda_suspend"),
        (EvictionPolicy(process_strategy=KEEP, escalate_to=STOP), "retain+keep_running, up to stop"),
        (EvictionPolicy(escalate_to=CUDA), "retain+cuda_suspend"),
        (EvictionPolicy(weight_strategy=newer, process_strategy=newer, escalate_to=newer), "77+77, up to 77"),
    ):
        assert policy_text(policy) == text


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
    scripted.answers["Plan"] = lambda request, context: fleet_pb2.PlanResponse()
    assert leasehold("suspend", "one", *options.split()).code == 0
    assert leasehold("suspend", "one", "--dry-run", "--force", *options.split()).code == 0
    [request] = scripted.asked(fleet_pb2.SuspendWorkloadRequest)
    [plan] = scripted.asked(fleet_pb2.PlanRequest)
    for operation in (request.operation, plan.operation.suspend):
        assert operation.HasField("policy") == (wanted is not None)
        assert operation.policy == (wanted or EvictionPolicy())
    assert (request.operation.force, plan.operation.suspend.force) == (False, True)


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
    scripted.answers["CreateWorkload"] = lambda request, context: fleet_pb2.CreateWorkloadResponse(
        workload=workload(), command=command(SUCCEEDED)
    )
    hooks = tmp_path / "hooks.json"
    hooks.write_text(json.dumps(HOOKS))
    options = ["--evict", "offload", "--escalate-to", "stop", "--hooks", str(hooks)]
    options += ["--keep-checkpoints", "7", "--from-checkpoint", "k-1"]
    assert leasehold("run", *options, "--", "serve").code == 0
    assert leasehold("run", "--escalate-to", "checkpoint", "--", "serve").code == 0
    assert leasehold("run", "--", "serve").code == 0
    first, second, third = scripted.asked(fleet_pb2.CreateWorkloadRequest)
    assert first.spec.eviction == make_policy("offload", "cuda_suspend", "stop")
    assert [hook.name for hook in first.spec.hooks] == ["weights", "note"]
    assert first.spec.hooks[0].timeout.seconds == 60
    assert list(first.spec.hooks[1].weight_strategies) == [OFFLOAD]
    assert (first.spec.keep_checkpoints, first.checkpoint_id) == (7, "k-1")
    assert second.spec.eviction == make_policy(escalate_to="checkpoint")
    assert third.spec == workload_pb2.WorkloadSpec(arguments=["serve"], resources=third.spec.resources)
    assert not third.checkpoint_id


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"name": "one"}', "has no list: write hooks as [{…}, …]"),
        ("[3]", "hook 0 is 3: write it as {…}"),
        (
            '[{}, {"nmae": "x"}]',
            'hook 1 is no Hook (Message type "leasehold.v1.Hook" has no field named "nmae"',
        ),
        ('[{"phase": "SOON"}]', "hook 0 is no Hook ("),
        ('[{"timeout": "soon"}]', "hook 0 is no Hook ("),
        ('[{"signal": {"signal_number": -1}}]', "hook 0 is no Hook ("),
        ('[{"name": "\\ud800"}]', "hook 0 is no Hook ("),
        ('[{"http": {"body": "{}"}}]', "hook 0 is no Hook (the body '{}' is not base64"),
        ('[{"drain": {"idle": {"body": "a"}}}]', "hook 0 is no Hook ("),
        ('[{"vllm": 7}]', "hook 0 is no Hook ("),
        ('[{"vllm": {}, "kernel": {}}]', "hook 0 is no Hook ("),
        ('["' + "x" * 1_000_000, "has more than 1000000 bytes"),
    ],
)
def test_a_file_of_hooks_that_is_none(
    leasehold: CommandLine, scripted: ScriptedCoordinator, tmp_path: Path, text: str, match: str
) -> None:
    hooks = tmp_path / "hooks.json"
    hooks.write_text(text)
    done = leasehold("run", "--hooks", str(hooks), "--", "serve")
    assert (done.code, done.stdout) == (2, "")
    assert f"leasehold: {hooks}" in done.stderr
    assert match in done.stderr
    assert done.stderr.count("\n") == 1
    assert not scripted.requests


def test_the_hooks_of_the_documentation_are_hooks(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()
    [block] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "hooks.json").write_text(block)
    assert [hook.WhichOneof("action") for hook in read_hooks(tmp_path / "hooks.json")] == ["vllm", "command"]


def test_a_file_of_hooks_that_is_not_there(tmp_path: Path) -> None:
    reads: list[Callable[[], object]] = [
        lambda: read_hooks(tmp_path / "none.json"),
        lambda: read_hooks(tmp_path),
    ]
    for read in reads:
        with pytest.raises(UsageError, match=r"can't be read.*name a file with a JSON list of hooks"):
            read()
    (tmp_path / "latin.json").write_bytes(b'["\xff"]')
    with pytest.raises(UsageError, match=r"latin.json is not JSON"):
        read_hooks(tmp_path / "latin.json")
    (tmp_path / "empty.json").write_text("[]")
    assert read_hooks(tmp_path / "empty.json") == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("suspend one --weights drop", "'drop' is not one of 'retain', 'offload', 'discard'"),
        ("suspend one --process suspend", "'suspend' is not one of 'keep_running', 'cuda_suspend'"),
        ("suspend one --escalate-to stop", "give --process or --weights too: see `leasehold suspend --help`"),
        ("suspend one --process stop --escalate-to checkpoint", "checkpoint is weaker than stop"),
        ("run --evict drop -- true", "'drop' is no eviction policy: write WEIGHTS+PROCESS"),
        ("run --evict offload+suspend -- true", "'suspend' is no process strategy: write keep_running"),
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
