"""The command as a whole: its help, and what it loads."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from leasehold_client import main, plugins
from packaging.utils import canonicalize_name

from .conftest import CommandLine

ROOT = Path(__file__).resolve().parents[2]
VERBS = [
    "get",
    "top",
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
    "annotate",
    "label",
    "cancel",
    "logs",
    "exec",
    "local",
    "demo",
    "doctor",
    "validate",
    "worker",
    "coordinator",
    "simgpu",
    "support-bundle",
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


@pytest.mark.parametrize(
    "arguments",
    [
        "demo --dir =",
        "demo --counter =",
        "run --hooks = -- true",
        "context use =",
        "install worker --join-file =",
        "uninstall worker --user =",
        "backup create =",
        "doctor --config =",
        "simgpu exec --dir = -- true",
        "simgpu show --dir =",
    ],
)
def test_an_empty_value_is_refused(
    bare_leasehold: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str
) -> None:
    """As a path, empty text would be the working directory."""
    monkeypatch.chdir(tmp_path)
    done = bare_leasehold(*("" if word == "=" else word for word in arguments.split()))
    assert (done.code, done.stdout) == (2, "")
    assert "the value is empty: give one" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_missing_extra_is_named_and_hides_no_other_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.MODULES, "nothing", ())
    monkeypatch.setitem(
        plugins.PLUGINS, "doctor", plugins.Plugin("", "leasehold_nothing.doctor:command", "nothing")
    )
    result = CliRunner().invoke(main.leasehold, ["doctor", "--quick"])
    assert result.exit_code == 2
    assert "`leasehold doctor` needs leasehold_nothing, which is not installed" in result.output
    assert "install the wheel of Leasehold with the extra nothing" in result.output
    help_text = CliRunner().invoke(main.leasehold, ["--help"]).output
    assert "(needs leasehold_nothing)" in help_text
    assert "Suspend workloads" in help_text


def test_a_missing_requirement_of_an_extra_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.MODULES, "worker", ("click", "no_such_package"))
    monkeypatch.setitem(plugins.MODULES, "coordinator", ("nor_this",))
    help_text = CliRunner().invoke(main.leasehold, ["--help"]).output
    assert "doctor          (needs no_such_package)" in help_text
    assert "worker          (needs no_such_package)" in help_text
    assert "coordinator     (needs nor_this)" in help_text
    assert "simgpu          Simulated GPU hosts" in help_text


def test_a_package_that_is_missing_when_a_daemon_starts_is_named(
    bare_leasehold: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command("worker")
    def starts_late() -> None:
        importlib.import_module("no_such_package")

    monkeypatch.setattr(importlib.import_module("leasehold_worker.agent.cli"), "command", starts_late)
    done = bare_leasehold("worker")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        "leasehold: `leasehold worker` needs no_such_package, which is not installed: "
        "install the wheel of Leasehold with the extra worker (docs/operations.md)\n"
    )


@pytest.mark.parametrize("name", [*main.VERBS, *plugins.PLUGINS])
def test_the_summaries_are_those_of_the_verbs(name: str) -> None:
    summary = main._summaries()[name]
    command = main.leasehold.get_command(click.Context(main.leasehold), name)
    assert command is not None
    assert command.help is not None
    assert command.help.startswith(summary)


def test_the_version_is_the_distributions() -> None:
    result = CliRunner().invoke(main.leasehold, ["--version"])
    assert result.output == f"leasehold, version {importlib.metadata.version('leasehold')}\n"


def test_the_client_imports_no_other_room() -> None:
    script = (
        "import importlib, pkgutil, sys, leasehold_client\n"
        "for module in pkgutil.iter_modules(leasehold_client.__path__, 'leasehold_client.'):\n"
        "    importlib.import_module(module.name)\n"
        "print([name for name in sys.modules if name.startswith('leasehold_') and 'client' not in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_modules_of_each_extra_are_those_of_its_packages() -> None:
    """What `leasehold --help` looks for, beside what pip installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    distributions = importlib.metadata.packages_distributions()
    modules = {"cuda-python": "cuda", "nvidia-ml-py": "pynvml"}  # the one has no module, the other an example
    for module, names in distributions.items():
        modules = {canonicalize_name(name): module for name in names} | modules
    for extra, found in plugins.MODULES.items():
        names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in extras[extra]]
        assert [modules[name] for name in names] == list(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("login --token -", "what was given is no join token"),
        ("run -f -", "the job file on standard input has no command: add the key command"),
        ("support-bundle b.tar.gz", "there is no terminal to ask"),
    ],
)
def test_a_closed_standard_input_is_an_empty_one(tmp_path: Path, line: str, said: str) -> None:
    command = f'exec "$0" -m leasehold_client {line} <&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


GRPC_LEVEL = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))

sys.meta_path.insert(0, Finder())
import leasehold_client
print(os.environ.get("GRPC_VERBOSITY"))
import leasehold_client.{}.client
"""


@pytest.mark.parametrize("package", ["aio", "coordinator"])
def test_grpc_logs_no_handshakes_and_the_package_alone_changes_no_environment(package: str) -> None:
    """gRPC reads its level when it is imported, and programs inherit the environment."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    command = [sys.executable, "-c", GRPC_LEVEL.format(package)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "ERROR"]
