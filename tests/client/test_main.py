"""The command as a whole: its help, and what it loads."""

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint

import click
import pytest
from click.testing import CliRunner
from leasehold_client import main, rooms

from .conftest import CommandLine

VERBS = [
    "get",
    "run",
    "suspend",
    "restore",
    "remap",
    "stop",
    "adopt",
    "release",
    "cordon",
    "uncordon",
    "gpu",
    "forget",
    "cancel",
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


def test_help_lists_what_needs_a_worker_on_this_host_without_loading_it() -> None:
    output = CliRunner().invoke(main.leasehold, ["--help"]).output
    for name, (summary, place) in main.LOCAL_VERBS.items():
        assert f"  {name} " in output
        assert " ".join(output.split()).count(summary) == 1
        assert place.startswith("leasehold_client.")


def test_an_unknown_verb_is_a_usage_error() -> None:
    assert CliRunner().invoke(main.leasehold, ["nothing"]).exit_code == 2


def test_a_missing_extra_is_named_and_hides_no_other_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("doctor", "leasehold_nothing.doctor:command", "leasehold.commands")
    monkeypatch.setattr(rooms, "entry_points", lambda group: [point])
    result = CliRunner().invoke(main.leasehold, ["doctor", "--quick"])
    assert result.exit_code == 2
    assert "`leasehold doctor` needs leasehold_nothing, which is not installed" in result.output
    assert "pip install 'leasehold[nothing]'" in result.output
    help_text = CliRunner().invoke(main.leasehold, ["--help"]).output
    assert "(needs leasehold_nothing)" in help_text
    assert "Park a workload" in help_text


def test_a_missing_requirement_of_an_extra_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["click>=8", "no-such-package>=1; extra == 'worker'", "nor-this; extra == 'coordinator'"]
    monkeypatch.setattr(rooms, "requires", lambda name: needs)
    modules = {
        "worker": "leasehold_worker.cli",
        "doctor": "leasehold_worker.doctor",
        "coordinator": "leasehold_coordinator.cli",
        "simgpu": "leasehold_simgpu.cli",
    }
    points = [EntryPoint(name, f"{module}:command", "leasehold.commands") for name, module in modules.items()]
    monkeypatch.setattr(rooms, "entry_points", lambda group: points)
    help_text = CliRunner().invoke(main.leasehold, ["--help"]).output
    assert "doctor       (needs no-such-package)" in help_text
    assert "worker       (needs no-such-package)" in help_text
    assert "coordinator  (needs nor-this)" in help_text
    assert "simgpu       Run programs" in help_text


def test_a_package_that_is_missing_when_a_daemon_starts_is_named(
    bare_leasehold: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command("worker")
    def starts_late() -> None:
        importlib.import_module("no_such_package")

    monkeypatch.setattr(rooms, "load", lambda point: starts_late)
    done = bare_leasehold("worker")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        "leasehold: `leasehold worker` needs no_such_package, which is not installed: "
        "pip install 'leasehold[worker]'\n"
    )


@pytest.mark.parametrize(("name", "summary"), [*main.VERBS.items(), ("demo", main.DEMO_SUMMARY)])
def test_the_summaries_are_those_of_the_verbs(name: str, summary: str) -> None:
    command = main.leasehold.get_command(click.Context(main.leasehold), name)
    assert command is not None
    assert command.help is not None
    assert command.help.startswith(summary)


def test_help_loads_neither_grpc_nor_rich_nor_a_room() -> None:
    script = (
        "import sys; from leasehold_client.main import leasehold\n"
        "leasehold(['--help'], standalone_mode=False)\n"
        "heavy = {'grpc', 'rich', 'google.protobuf', 'trio', 'leasehold_worker', 'leasehold_coordinator'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
