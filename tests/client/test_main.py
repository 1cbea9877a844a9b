"""The command as a whole: its help, and what it loads."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner
from leasehold_client import main, rooms

VERBS = [
    "get",
    "run",
    "suspend",
    "restore",
    "remap",
    "stop",
    "logs",
    "demo",
    "worker",
    "coordinator",
    "simgpu",
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    result = CliRunner().invoke(main.leasehold, [verb, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_help_lists_every_verb_and_the_exit_codes() -> None:
    result = CliRunner().invoke(main.leasehold, ["--help"])
    assert result.exit_code == 0
    for verb in VERBS:
        assert f"  {verb} " in result.output
    assert "3    no coordinator answers" in result.output


def test_an_unknown_verb_is_a_usage_error() -> None:
    assert CliRunner().invoke(main.leasehold, ["nothing"]).exit_code == 2


def test_a_missing_extra_is_named_and_hides_no_other_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("worker", "no_such_package.cli:command", "leasehold.commands")
    monkeypatch.setattr(rooms, "entry_points", lambda group: [point])
    result = CliRunner().invoke(main.leasehold, ["worker", "--name", "alpha"])
    assert result.exit_code == 2
    assert "pip install 'leasehold[worker]'" in result.output
    help_text = CliRunner().invoke(main.leasehold, ["--help"]).output
    assert "(needs no_such_package)" in help_text
    assert "Park a workload" in help_text


def test_the_version_is_the_distributions() -> None:
    result = CliRunner().invoke(main.leasehold, ["--version"])
    assert "0.1.0" in result.output


def test_the_client_imports_no_other_room() -> None:
    script = (
        "import sys, leasehold_client.verbs, leasehold_client.demo\n"
        "print([name for name in sys.modules if name.startswith('leasehold_') and 'client' not in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
