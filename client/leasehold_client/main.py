"""The ``leasehold`` command. Each room adds its own part through the entry points ``leasehold.commands``."""

import sys
from importlib.metadata import entry_points
from typing import Final

import click

EPILOG: Final = """\b
Exit codes:
  0    done
  1    the operation failed, or was refused
  2    bad usage: an option, a name, a pair or a configuration is wrong
  3    no coordinator answers
  130  interrupted; the command goes on

LEASEHOLD_COORDINATOR names the coordinator (default 127.0.0.1:7400).
"""

VERB_NAMES: Final = ("get", "run", "suspend", "restore", "remap", "stop", "logs")


ROOM_EXTRAS: Final = ("worker", "coordinator", "simgpu")


class LazyGroup(click.Group):
    """Loads a subcommand when it is called: ``--help`` of one needs none of the others' packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        rooms = {point.name for point in entry_points(group="leasehold.commands")}
        return sorted({*VERB_NAMES, "demo", *rooms})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads one subcommand; one whose packages are missing stays in the list, and says so when called."""
        try:
            return _load(cmd_name)
        except ModuleNotFoundError as error:
            missing = error

        def refuse() -> None:
            raise _not_installed(cmd_name, missing)

        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        return click.Command(
            cmd_name, callback=refuse, context_settings=settings, short_help=f"(needs {missing.name})"
        )


class NotInstalledError(click.ClickException):
    """A subcommand's packages are missing."""

    exit_code = 2


def _not_installed(name: str, error: ModuleNotFoundError) -> NotInstalledError:
    extra = name if name in ROOM_EXTRAS else "client"
    return NotInstalledError(
        f"`leasehold {name}` needs {error.name}, which is not installed: pip install 'leasehold[{extra}]'"
    )


def _load(name: str) -> click.Command | None:
    if name in VERB_NAMES:
        from leasehold_client.verbs import VERBS

        return next(verb for verb in VERBS if verb.name == name)
    if name == "demo":
        from leasehold_client.demo import demo

        return demo
    for point in entry_points(group="leasehold.commands"):
        if point.name == name:
            loaded: object = point.load()  # its type is only known at run time
            if not isinstance(loaded, click.Command):
                raise TypeError(f"entry point {point.value} is not a click command")
            return loaded
    return None


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="leasehold")
def leasehold() -> None:
    """Lease the GPUs of a fleet; suspend, restore and move running CUDA processes between them."""


def main() -> None:
    """Runs the command line."""
    try:
        leasehold(prog_name="leasehold")
    except ModuleNotFoundError as error:  # what a daemon imports only when it starts
        refusal = _not_installed(sys.argv[1], error)
        refusal.show()
        sys.exit(refusal.exit_code)
