"""The ``leasehold`` command. Each room adds its own part through the entry points ``leasehold.commands``."""

import io
import sys
from importlib.metadata import EntryPoint
from typing import Any, Final, NoReturn

import click

from leasehold_client import interrupts, rooms
from leasehold_client.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE
from leasehold_client.standard_output import printed_by_click
from leasehold_client.terminal_text import echo_error

EPILOG: Final = """\b
Exit codes:
  0    done
  1    the operation failed, or was refused
  2    bad usage: an option, a name, a pair or a configuration is wrong
  3    no coordinator answers
  4    what was waited for has not happened in the time that is allowed; it goes on
  130  interrupted; the command goes on

LEASEHOLD_COORDINATOR names the coordinator (default 127.0.0.1:7400).
"""

VERBS: Final = {
    "get": "List workers, GPUs, workloads, checkpoints, commands or events, or show the one called NAME.",
    "run": "Start a workload on a worker.",
    "wait": "Wait until a workload is ready, or has ended.",
    "suspend": "Park a workload: its device memory goes elsewhere, and its GPUs are free for others.",
    "wake": "Wake a parked workload: on the same GPUs if they are free, else on others of the same chip.",
    "restore": "Wake a parked workload: on the same GPUs if they are free, else on others of the same chip.",
    "remap": "Move running workloads to other GPUs of their worker, without their knowing.",
    "checkpoint": "Have the application of a running workload save itself, and go on.",
    "rm": "Delete what lies on the disks of workers: checkpoints.",
    "stop": "End a workload.",
    "adopt": "Take in a process that runs already on a worker's host, as a workload.",
    "release": "Let a workload go that was adopted, or that claimed its GPUs: it runs on.",
    "cordon": "Take GPUs or whole workers out of service: who has a GPU keeps it, and nobody gets a new one.",
    "uncordon": "Put GPUs or whole workers back into service.",
    "gpu": "Look after single GPUs: forget what is known against their health.",
    "forget": "Make the coordinator forget a worker that is gone for good.",
    "cancel": "Cancel a command that has not ended.",
    "logs": "Print what a workload wrote.",
}
LOCAL_VERBS: Final = {
    "exec": (
        "Run a command on this host with GPUs, as soon as it is its turn.",
        "leasehold_client.exec_verb:exec_command",
    ),
    "local": (
        "Look at this host's worker, without a coordinator: its leases and who waits.",
        "leasehold_client.local_verbs:local",
    ),
}
"""What needs a worker on this host and no coordinator: summaries, and where each verb is."""

DEMO_SUMMARY: Final = "Suspend, move and restore six counting processes on two simulated GPU hosts."


class NotInstalledError(click.ClickException):
    """A subcommand's packages are missing."""

    exit_code = EXIT_USAGE

    def __init__(self, name: str, error: ModuleNotFoundError) -> None:
        point = rooms.rooms().get(name)
        extra = rooms.extra_of(point) if point else "client"
        super().__init__(
            f"`leasehold {name}` needs {error.name}, which is not installed: pip install 'leasehold[{extra}]'"
        )


class LazyGroup(click.Group):
    """Loads a subcommand when it is called: nothing else is imported, and nothing else need be installed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        return sorted({*VERBS, *LOCAL_VERBS, "demo", *rooms.rooms()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads one subcommand; one whose packages are missing says which extra has them."""
        try:
            command = _load(cmd_name)
        except ModuleNotFoundError as error:
            raise NotInstalledError(cmd_name, error) from error
        interrupts.raise_in_verb()
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Reads the options of the command itself, of which --help and --version print."""
        with printed_by_click():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a subcommand."""
        with printed_by_click():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands without loading any. One whose packages are missing hides no other."""
        summaries = {**VERBS, "demo": DEMO_SUMMARY}
        summaries |= {name: summary for name, (summary, _) in LOCAL_VERBS.items()}
        for name, point in rooms.rooms().items():
            missing = rooms.missing_package(point)
            summaries[name] = f"(needs {missing})" if missing else rooms.SUMMARIES.get(name, "")
        with formatter.section("Commands"):
            formatter.write_dl(sorted(summaries.items()))


def _load(name: str) -> click.Command | None:
    if name in VERBS:
        from leasehold_client import verbs

        return next(command for command in verbs.VERBS if command.name == name)
    if name in LOCAL_VERBS:
        _, place = LOCAL_VERBS[name]
        return rooms.load(EntryPoint(name, place, "leasehold.commands"))
    if name == "demo":
        from leasehold_client.demo import demo

        return demo
    point = rooms.rooms().get(name)
    return rooms.load(point) if point else None


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="leasehold")
def leasehold() -> None:
    """Lease the GPUs of a fleet; suspend, restore and move running CUDA processes between them."""


def main() -> None:
    """Runs the command line, and exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal's encoding lacks is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = leasehold.main(prog_name="leasehold", standalone_mode=False)
    except click.ClickException as error:
        _fail(error)
    except ModuleNotFoundError as error:  # what a daemon imports only when it starts
        _fail(NotInstalledError(sys.argv[1], error))
    except click.Abort:
        echo_error("leasehold: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(error: click.ClickException) -> NoReturn:
    echo_error(_describe(error))
    sys.exit(error.exit_code)


def _describe(error: click.ClickException) -> str:
    """An error of usage as one line; a group that was called without a command shows its help instead."""
    message = error.format_message()
    if message.startswith("Usage:"):
        return message
    line = f"leasehold: {' '.join(message.split()).removesuffix('.')}"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        line += f": see `{error.ctx.command_path} --help`"
    return line
