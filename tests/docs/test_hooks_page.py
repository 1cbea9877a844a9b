"""The hooks that docs/hooks.md shows are accepted as they stand there."""

import json
import re
import tomllib
from pathlib import Path

from google.protobuf import json_format
from leasehold.v1 import workload_pb2
from leasehold_worker.hooks.validation import check_hooks

PAGE = Path(__file__).resolve().parents[2] / "docs/hooks.md"


def test_every_example_is_accepted() -> None:
    page = PAGE.read_text()
    specs = [{"hooks": json.loads(block)} for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    specs += [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    assert len(specs) >= 6
    for spec in specs:
        hooks = json_format.ParseDict(spec, workload_pb2.WorkloadSpec()).hooks
        assert hooks
        check_hooks(hooks)


def test_the_body_in_base64_is_the_one_that_is_told() -> None:
    page = PAGE.read_text()
    found = re.search(r'"body": "(.*?)"', page)
    assert found
    hook = json_format.ParseDict({"body": found[1]}, workload_pb2.HttpHook())
    assert f"`{hook.body.decode()}`" in page
