"""The hooks that docs/hooks.md shows can be given to ``leasehold run --hooks`` as they stand there."""

import re
from pathlib import Path

import pytest
from google.protobuf import json_format
from leasehold.v1 import hook_pb2
from leasehold_client.arguments.hooks_file import read_hooks
from leasehold_worker.hooks.validation import check_hooks

PAGE = Path(__file__).resolve().parents[2] / "docs/hooks.md"
TEXT = PAGE.read_text()
EXAMPLES = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
KINDS = {action.name for action in hook_pb2.Hook.DESCRIPTOR.oneofs_by_name["action"].fields}


def test_examples_are_of_the_one_form_that_is_read() -> None:
    assert set(re.findall(r"^```(\w+)", TEXT, re.MULTILINE)) == {"json"}


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_every_example_is_accepted(example: str, tmp_path: Path) -> None:
    file = tmp_path / "hooks.json"
    file.write_text(example)
    hooks = read_hooks(file)
    assert hooks
    check_hooks(hooks)


def test_every_kind_of_hook_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "hooks.json"
    inline = re.findall(r'`(\{"name".*?\})`', TEXT)
    shown = set()
    for example in [*EXAMPLES, *(f"[{each}]" for each in inline)]:
        file.write_text(example)
        shown |= {hook.WhichOneof("action") for hook in read_hooks(file)}
    assert shown == KINDS


def test_fields_are_named_as_the_protos_name_them() -> None:
    assert not re.findall(r"`[a-z]+[A-Z]\w*`|\"[a-z]+[A-Z]\w*\"", TEXT)


def test_the_body_in_base64_is_the_one_that_is_told() -> None:
    found = re.search(r'"body": "(.*?)"', TEXT)
    assert found
    hook = json_format.ParseDict({"body": found[1]}, hook_pb2.HttpHook())
    assert f"`{hook.body.decode()}`" in TEXT
