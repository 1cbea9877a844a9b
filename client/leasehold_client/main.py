"""The ``leasehold`` command. Each subcommand is imported when it is called."""

import io
import sys
from importlib import import_module
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem

from leasehold_client import __version__, interrupts
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE
from leasehold_client.display.standard_output import printed_by_click
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.plugins import ROOMS, missing_module

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
    "get": (
        "List workers, GPUs, workloads, checkpoints, commands or events, or show the one called NAME.",
        "leasehold_client.cli.get:get",
    ),
    "run": (
        "Start a workload on a worker.",
        "leasehold_client.cli.run:run",
    ),
    "wait": (
        "Wait until a workload is ready, or has ended.",
        "leasehold_client.cli.wait:wait",
    ),
    "suspend": (
        "Park a workload: its device memory goes elsewhere, and its GPUs are free for others.",
        "leasehold_client.cli.suspend:suspend",
    ),
    "wake": (
        "Wake a parked workload: on the same GPUs if they are free, else on others of the same chip.",
        "leasehold_client.cli.restore:wake",
    ),
    "restore": (
        "Wake a parked workload: on the same GPUs if they are free, else on others of the same chip.",
        "leasehold_client.cli.restore:restore",
    ),
    "remap": (
        "Move running workloads to other GPUs of their worker, without their knowing.",
        "leasehold_client.cli.remap:remap",
    ),
    "checkpoint": (
        "Have the application of a running workload save itself, and go on.",
        "leasehold_client.cli.checkpoint:checkpoint",
    ),
    "rm": (
        "Delete what lies on the disks of workers: checkpoints.",
        "leasehold_client.cli.rm:rm",
    ),
    "stop": (
        "End a workload.",
        "leasehold_client.cli.stop:stop",
    ),
    "adopt": (
        "Take in a process that runs already on a worker's host, as a workload.",
        "leasehold_client.cli.adopt:adopt",
    ),
    "release": (
        "Let a workload go that was adopted, or that claimed its GPUs: it runs on.",
        "leasehold_client.cli.release:release",
    ),
    "cordon": (
        "Take GPUs or whole workers out of service: who has a GPU keeps it, and nobody gets a new one.",
        "leasehold_client.cli.cordon:cordon",
    ),
    "uncordon": (
        "Put GPUs or whole workers back into service.",
        "leasehold_client.cli.cordon:uncordon",
    ),
    "gpu": (
        "Look after single GPUs: forget what is known against their health.",
        "leasehold_client.cli.gpu:gpu",
    ),
    "forget": (
        "Make the coordinator forget a worker that is gone for good.",
        "leasehold_client.cli.forget:forget",
    ),
    "cancel": (
        "Cancel a command that has not ended.",
        "leasehold_client.cli.cancel:cancel",
    ),
    "logs": (
        "Print what a workload wrote.",
        "leasehold_client.cli.logs:logs",
    ),
    "exec": (
        "Run a command on this host with GPUs, as soon as it is its turn.",
        "leasehold_client.cli.exec:exec_command",
    ),
    "local": (
        "Look at this host's worker, without a coordinator: its leases and who waits.",
        "leasehold_client.cli.local:local",
    ),
    "demo": (
        "Suspend, move and restore six counting processes on two simulated GPU hosts.",
        "leasehold_client.demo.command:demo",
    ),
}
"""The client's own subcommands: what ``leasehold --help`` says of each, and where each is, as MODULE:NAME."""


class NotInstalledError(click.ClickException):
    """A subcommand's packages are missing."""

    exit_code = EXIT_USAGE

    def __init__(self, name: str, error: ModuleNotFoundError) -> None:
        extra = ROOMS[name].extra if name in ROOMS else "client"
        super().__init__(
            f"`leasehold {name}` needs {error.name}, which is not installed: pip install 'leasehold[{extra}]'"
        )


class LazyGroup(click.Group):
    """Loads a subcommand when it is called: nothing else is imported, and nothing else need be installed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        return sorted({*VERBS, *ROOMS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads one subcommand; one whose packages are missing says which extra has them."""
        try:
            command = _load(cmd_name)
        except ModuleNotFoundError as error:
            raise NotInstalledError(cmd_name, error) from error
        if cmd_name in ROOMS:  # a verb of ours imports more before it begins
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
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_summaries().items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the name of a subcommand without loading any, or an option."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        summaries = _summaries()
        return [*(CompletionItem(name, help=summaries[name]) for name in names), *options]


def _summaries() -> dict[str, str]:
    """What is said of each subcommand, by its name."""
    summaries = {name: summary for name, (summary, _) in VERBS.items()}
    for name, room in ROOMS.items():
        missing = missing_module(room)
        summaries[name] = f"(needs {missing})" if missing else room.summary
    return summaries


def _load(name: str) -> click.Command | None:
    if name in VERBS:
        _, place = VERBS[name]
    elif name in ROOMS:
        place = ROOMS[name].place
    else:
        return None
    module, _, attribute = place.partition(":")
    command: object = getattr(import_module(module), attribute)  # the type is only known at run time
    if not isinstance(command, click.Command):
        raise TypeError(f"{place} is not a click command")
    return command


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
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
