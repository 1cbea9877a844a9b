"""Hooks as a file says them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, hook_pb2
from leasehold_client.arguments.hooks_file import read_hooks
from leasehold_client.arguments.policies import PROCESSES, WEIGHTS
from leasehold_client.errors import UsageError

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
KEEP, CUDA, IMAGE, STOP = PROCESSES.values()
RETAIN, OFFLOAD, DISCARD = WEIGHTS.values()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"name": "one"}', "is not a list: write hooks as [{…}, …]"),
        ('[{"name": "a", "name": "b"}]', "the key 'name' occurs twice in one table: leave one out"),
        ('[{}, {"timeout": "-1s"}]', "hook 1: its timeout is -1 s: write more than 0 s and at most 3600 s"),
        ('[{"timeout": "0s"}]', "hook 0: its timeout is 0 s: write more"),
        ('[{"timeout": "3601s"}]', "hook 0: its timeout is 3601 s: write more"),
        ("[3]", "hook 0 is 3, not an object: write {…}"),
        (
            '[{}, {"nmae": "x"}]',
            "hook 1 has the unknown key 'nmae' (did you mean 'name'?): the keys are name, phase, timeout",
        ),
        (
            '[{"drain": {"admitAgai": {}}}]',
            "hook 0: drain has the unknown key 'admitAgai' (did you mean 'admit_again'?): the keys are",
        ),
        ('[{"nope": 1}]', "sglang, kernel, weight_strategies, frees_memory, drain"),
        (
            '[{"phase": "SOON"}]',
            'hook 0: phase is "SOON": write one of HOOK_PHASE_BEFORE_SUSPEND, HOOK_PHASE_AFTER_RESTORE, HO',
        ),
        (
            '[{"weight_strategies": ["RETAIN", "none"]}]',
            'weight_strategies is ["WEIGHT_STRATEGY_RETAIN", "none"]: write a list, each one of WEIGHT_',
        ),
        ('[{"timeout": {"seconds": 2}}]', 'hook 0: timeout is {"seconds": 2}: write seconds with an s'),
        ('[{"timeout": "2"}]', 'hook 0: timeout is "2": write seconds with an s, such as "30s"'),
        (
            '[{"signal": {"signal_number": 1099511627776}}]',
            "hook 0: signal: signal_number is 1099511627776: write a whole number",
        ),
        ('[{"name": "\\ud800"}]', 'hook 0: name is "\\ud800": write a text'),
        ('[{"frees_memory": 1}]', "hook 0: frees_memory is 1: write true or false"),
        ('[{"http": {"body": "{}"}}]', 'hook 0: http: body is "{}": write base64, the JSON form of bytes'),
        ('[{"drain": {"idle": {"body": "a"}}}]', 'hook 0: drain: idle: body is "a": write base64'),
        ('[{"vllm": 7}]', "hook 0: vllm is 7: write an object {…}"),
        ('[{"vllm": {}, "kernel": {}}]', "hook 0 has vllm and kernel: give only one of them"),
        ('["' + "x" * 1_000_000, "exceeds the limit of 1000000 bytes"),
    ],
)
def test_a_file_of_hooks_that_is_none(
    leasehold: CommandLine, scripted: ScriptedCoordinator, tmp_path: Path, text: str, match: str
) -> None:
    hooks = tmp_path / "hooks.json"
    hooks.write_text(text)
    done = leasehold("run", "--hooks", str(hooks), "--", "serve")
    assert (done.code, done.stdout) == (2, "")
    assert f"leasehold: the hooks file {hooks}" in done.stderr
    assert match in done.stderr
    assert done.stderr.count("\n") == 1
    assert not scripted.requests


def test_names_of_enums_may_lack_their_prefix(tmp_path: Path) -> None:
    hooks = tmp_path / "hooks.json"
    hooks.write_text(
        '[{"phase": "READINESS", "weightStrategies": ["DISCARD", "WEIGHT_STRATEGY_OFFLOAD"]},'
        ' {"phase": "HOOK_PHASE_READINESS"}]'
    )
    short, full = read_hooks(hooks)
    assert short.phase == full.phase == hook_pb2.HOOK_PHASE_READINESS
    assert short.weight_strategies == [DISCARD, OFFLOAD]


def test_the_hooks_of_the_documentation_are_hooks(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/cli.md").read_text()
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
