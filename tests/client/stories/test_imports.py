"""What the command line imports: most of the time that a verb takes. Nobody imports more than is needed."""

import subprocess
import sys
from typing import Final

import pytest
from leasehold_client import main, plugins

CLIENT_LIBRARIES: Final = {"google.protobuf", "grpc", "leasehold.v1"}
"""What takes longest to import of what a verb needs."""

UNNEEDED: Final = {"asyncio", "importlib.metadata", "msgspec", "rich"}
"""What nothing needs that only prints what it can do."""

ROOMS: Final = {"pynvml", "cuda.bindings", "sqlalchemy", "trio", "uvloop"}

ALL_HELP = """
import click, sys
from leasehold_client.main import leasehold

def show_help(command, path):
    leasehold([*path, "--help"], standalone_mode=False)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            show_help(command.get_command(context, name), [*path, name])

context = click.Context(leasehold)
show_help(leasehold, [])
"""
"""The help of the command, of each subcommand, and of what these have."""

COMPLETION = """
import os
from leasehold_client.main import leasehold

lines = "/w/--/get w/run --/rm /suspend --process /worker --/coordinator --/doctor --/validate --"
for line in lines.split("/"):
    words = f"leasehold {line}"
    os.environ |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    os.environ["_LEASEHOLD_COMPLETE"] = "bash_complete"
    try:
        leasehold.main([], prog_name="leasehold", standalone_mode=False)
    except SystemExit as ended:
        assert ended.code == 0
"""
VERSION = "from leasehold_client.main import leasehold; leasehold(['--version'], standalone_mode=False)"
DEFINITIONS = "import leasehold_client, leasehold_client.config, leasehold_client.errors"


def imported(script: str, *arguments: str) -> tuple[set[str], str]:
    """The modules that a child process has at its end, and what it printed besides."""
    script = f"import atexit, sys\natexit.register(lambda: print('modules', *sys.modules))\n{script}"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr, done.stderr
    printed, _, modules = done.stdout.rpartition("modules ")
    return set(modules.split()), printed


@pytest.mark.parametrize(
    "script",
    [ALL_HELP, COMPLETION, VERSION, DEFINITIONS],
    ids=["help", "completion", "version", "definitions"],
)
def test_help_completion_and_version_import_neither_grpc_nor_protobuf(script: str) -> None:
    modules, printed = imported(script)
    assert script != ALL_HELP or printed.count("Usage:") > len(main.VERBS) + len(plugins.PLUGINS)
    assert not modules & (CLIENT_LIBRARIES | UNNEEDED | ROOMS)


def test_completion_names_subcommands_choices_and_options() -> None:
    """So the test above has seen what a shell asks for."""
    _, printed = imported(COMPLETION)
    assert {"plain,wake", "plain,worker", "plain,workloads", "plain,cuda_suspend"} <= set(printed.split())
    assert {"plain,--gpus", "plain,checkpoint", "plain,--state-dir", "plain,--listen"} <= set(printed.split())


@pytest.mark.long
def test_a_verb_imports_no_metadata_and_no_settings_library_and_no_other_verb() -> None:
    modules, _ = imported(
        "from leasehold_client.__main__ import main; main()", "get", "gpus", "--coordinator", "127.0.0.1:1"
    )
    assert modules >= CLIENT_LIBRARIES
    assert not modules & {"importlib.metadata", "msgspec", "rich", "tomllib", *ROOMS}
    assert not {"leasehold_client.cli.suspend", "leasehold_client.cli.exec"} & modules


def test_a_verb_of_this_host_needs_no_client_of_the_coordinator() -> None:
    modules, _ = imported(
        "from leasehold_client.__main__ import main; main()", "local", "leases", "--socket", "none.sock"
    )
    assert modules >= CLIENT_LIBRARIES
    assert "leasehold_client.coordinator.client" not in modules
