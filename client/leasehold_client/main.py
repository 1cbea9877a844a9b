"""The ``leasehold`` command, which imports a subcommand when it is called."""

import io
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem

from leasehold_client import __version__, interrupts
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE, fail
from leasehold_client.display.standard_output import printed_by_click
from leasehold_client.display.terminal_text import echo_error, one_line
from leasehold_client.errors import LeaseholdError
from leasehold_client.plugins import PLUGINS, missing_module

EPILOG: Final = """\b
Exit codes:
  0    success
  1    the operation failed or was refused
  2    usage error: an option, a value, a pair or a configuration file is invalid
  3    no coordinator answers
  4    the wait timed out, or the worker is out of contact; the command or workload continues
  130  interrupted; the command continues

LEASEHOLD_COORDINATOR names the coordinator: HOST:PORT, insecure:HOST:PORT (without TLS) or unix:PATH
(default: this user's coordinator). `leasehold VERB --help` has examples.
"""

VERBS: Final = {
    "get": "List workers, GPUs, workloads, checkpoints, commands, events or the audit, or show some by NAME.",
    "describe": "Show all about one object: its parts, times, commands and events.",
    "top": "Show the fleet on a terminal, live, with keys to suspend, restore, move and stop.",
    "events": "Show the newest events, the newest last.",
    "logs": "Print the output of a workload.",
    "wait": "Wait until workloads are ready, have ended or are in a state.",
    "whoami": "Show the identity and the role that the coordinator sees.",
    "version": "Show the versions of this program and of the coordinator.",
    "run": "Start a workload on a worker.",
    "exec": "Run a command with GPUs of this host, once they are granted.",
    "stop": "Stop workloads.",
    "rm": "Delete checkpoints, and records of ended workloads and of workers that are gone.",
    "adopt": "Adopt a running process of a worker's host as a workload.",
    "release": "Release an adopted or claimed workload: its processes keep running, and its lease ends.",
    "label": "Set or remove labels of a workload.",
    "annotate": "Set or remove annotations of a workload.",
    "suspend": "Suspend workloads and free their GPUs for others.",
    "restore": "Restore suspended workloads on their former GPUs, or else on free GPUs of the same chip.",
    "wake": "The same as restore.",
    "remap": "Move running workloads to other GPUs of their worker.",
    "checkpoint": "Checkpoint the applications of running workloads, which keep running.",
    "cancel": "Cancel commands that have not ended.",
    "cordon": "Take GPUs or whole workers out of service: leases stay, and no new ones are granted.",
    "uncordon": "Put GPUs or whole workers back into service.",
    "gpu": "Manage the recorded health of GPUs, and the GPUs of enrolled workers.",
    "support-bundle": "Write an archive for a bug report to FILE, a new file that only you may read.",
    "login": "Get a client certificate by a join token, and keep it in a context.",
    "context": "List, choose, export and delete contexts, which `leasehold login` makes.",
    "access": "Give roles to users and services, and take them away.",
    "token": "Create, list and delete join tokens of workers, users and services.",
    "ca": "List and revoke client certificates, block identities, and rotate the authority.",
    "audit": "Verify that nobody changed the audit.",
    "install": "Install the coordinator or the worker as a service of systemd.",
    "uninstall": "Remove the service of the coordinator or the worker.",
    "web": "Serve the web page on this host, as a client of the coordinator.",
    "local": "Show and release leases of this host's worker, without a coordinator.",
    "demo": "Suspend, move and restore six counting processes on two simulated GPU hosts.",
    "completion": "Print the script that makes a shell complete verbs, options and names.",
}
"""Summary of each subcommand of the client, for ``leasehold --help``."""

SECTIONS: Final = {
    "See what is there": "get top describe events logs wait whoami version",
    "Run and stop": "run stop adopt release label annotate rm",
    "Suspend and move": "suspend restore wake remap checkpoint cancel",
    "Operate a fleet": "web cordon uncordon gpu support-bundle",
    "Users and access": "login context access token ca audit",
    "Daemons": "coordinator worker install uninstall backup",
    "On a GPU host": "exec local doctor validate",
    "Try out, and set up": "demo simgpu completion",
}
"""Subcommands by task, in the order of ``leasehold --help``."""

MEANT: Final = {
    "list": "get workloads",
    "ls": "get workloads",
    "ps": "get workloads",
    "status": "get workloads",
    "show": "describe",
    "inspect": "describe",
    "delete": "rm",
    "remove": "rm",
    "kill": "stop",
    "pause": "suspend",
    "park": "suspend",
    "evict": "suspend",
    "resume": "restore",
    "unpause": "restore",
    "move": "remap",
    "migrate": "remap",
    "swap": "remap",
    "drain": "cordon",
    "log": "logs",
    "attach": "logs -f",
    "start": "run",
    "submit": "run",
    "create": "run",
    "config": "context",
    "help": "--help",
}
"""Words of other programs, and what stands for them here."""

_PLACES: Final = {
    "wake": "leasehold_client.cli.restore:wake",
    "uncordon": "leasehold_client.cli.cordon:uncordon",
    "uninstall": "leasehold_client.cli.install:uninstall",
    "annotate": "leasehold_client.cli.label:annotate",
    "exec": "leasehold_client.cli.exec:exec_command",
    "demo": "leasehold_client.demo.command:demo",
    "support-bundle": "leasehold_client.cli.support_bundle:support_bundle",
}
"""Places, as MODULE:NAME, of the subcommands that have no module of their own name."""


COMPLETE_VARIABLE: Final = "_LEASEHOLD_COMPLETE"
"""Environment variable by which a shell asks for completions."""

SHELLS: Final = ("bash", "zsh", "fish")
"""Shells for which there is a completion script."""

_EXTRAS: Final = {"web": "client,web"}
"""Extras of the subcommands of the client that need more than ``client``."""


class NotInstalledError(click.ClickException):
    """A subcommand's packages are missing."""

    exit_code = EXIT_USAGE

    def __init__(self, name: str, error: ModuleNotFoundError) -> None:
        extra = PLUGINS[name].extra if name in PLUGINS else _EXTRAS.get(name, "client")
        super().__init__(
            f"`leasehold {name}` needs {error.name}, which is not installed: install the wheel of Leasehold "
            f"with the extra {extra} (docs/operations.md)"
        )


class LazyGroup(click.Group):
    """Imports a subcommand when it is called. Other subcommands are neither imported nor required."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        return sorted({*VERBS, *PLUGINS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads one subcommand.

        Raises:
            NotInstalledError: A package of the subcommand is missing.
        """
        try:
            command = _load(cmd_name)
        except ModuleNotFoundError as error:
            if ctx.resilient_parsing:  # a shell completes a line, and shows no errors
                return None
            raise NotInstalledError(cmd_name, error) from error
        if cmd_name in PLUGINS:  # a verb of the client does so itself, after its imports
            interrupts.raise_in_verb()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the subcommand of a line.

        Raises:
            UsageError: There is none. The message suggests what may be meant.
        """
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-") or name in VERBS or name in PLUGINS:
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"No such command {name!r}{_suggestion(name)}", ctx)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parses the options of the group. --help and --version print."""
        with printed_by_click():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a subcommand."""
        with printed_by_click():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands by task without importing any, also those with missing packages."""
        summaries = _summaries()
        width = max(map(len, summaries))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summaries[name]) for name in names.split()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes an option, or the name of a subcommand without importing any."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        summaries = _summaries()
        return [*(CompletionItem(name, help=summaries[name]) for name in names), *options]


def _summaries() -> dict[str, str]:
    """The summary of each subcommand, by name."""
    summaries = dict(VERBS)
    for name, plugin in PLUGINS.items():
        missing = missing_module(plugin)
        summaries[name] = f"(needs {missing})" if missing else plugin.summary
    return summaries


def _suggestion(name: str) -> str:
    """A suggestion for a mistyped subcommand, for the end of the message. Empty: no name is close."""
    from leasehold_client.arguments.kinds import BY_WORD
    from leasehold_client.arguments.suggestions import closest

    word = name.lower()
    if word in BY_WORD:
        return f": did you mean `leasehold get {BY_WORD[word].plural}`?"
    known = word if word in MEANT else closest(word, [*VERBS, *PLUGINS, *BY_WORD, *MEANT])
    if known is None:
        return ""
    kind = BY_WORD.get(known) if known not in (*VERBS, *PLUGINS) else None
    meant = f"get {kind.plural}" if kind is not None else MEANT.get(known, known)
    return f": did you mean `leasehold {meant}`?"


def _load(name: str) -> click.Command | None:
    if name in VERBS:
        place = _PLACES.get(name, f"leasehold_client.cli.{name}:{name}")
    elif name in PLUGINS:
        place = PLUGINS[name].place
    else:
        return None
    module, _, attribute = place.partition(":")
    command: object = getattr(import_module(module), attribute)  # a place is text, so its type is unknown
    if not isinstance(command, click.Command):
        raise TypeError(f"{place} is not a click command")
    return command


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__)
def leasehold() -> None:
    """Lease the GPUs of a fleet; suspend, restore and move running CUDA processes between them."""


def main() -> None:
    """Runs the command line, and exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdin is None:  # it was closed, as by a shell's <&-
        sys.stdin = open(os.devnull)  # noqa: SIM115 - it stays open
    if COMPLETE_VARIABLE in os.environ and not _is_completion(os.environ):
        _fail(click.UsageError(f"{COMPLETE_VARIABLE} is for scripts of `leasehold completion`: unset it"))
    if COMPLETE_VARIABLE in os.environ:
        import_module("leasehold_client.cli.bash_words")  # click gets its class
    try:
        status = leasehold.main(prog_name="leasehold", standalone_mode=False)
    except click.ClickException as error:
        _fail(error)
    except LeaseholdError as error:  # of a verb that calls no coordinator
        fail(error)
    except ModuleNotFoundError as error:  # a daemon imports some packages at its start
        _fail(NotInstalledError(sys.argv[1], error))
    except click.Abort:
        echo_error("leasehold: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _is_completion(variables: Mapping[str, str]) -> bool:
    """Whether a script of a shell asks, whose variables click reads without a check."""
    shell, _, action = variables[COMPLETE_VARIABLE].rpartition("_")
    if shell not in SHELLS or action not in ("source", "complete"):
        return False
    words, position = variables.get("COMP_WORDS"), variables.get("COMP_CWORD")
    has_words = words is not None and position is not None and (shell == "fish" or position.isdecimal())
    return action == "source" or has_words


def _fail(error: click.ClickException) -> NoReturn:
    echo_error(*_describe(error).splitlines())
    sys.exit(error.exit_code)


def _describe(error: click.ClickException) -> str:
    """A usage error as one line. A group without a subcommand shows its help instead."""
    message = error.format_message()
    if message.startswith("Usage:"):
        return message
    group = error.ctx.command if isinstance(error, click.UsageError) and error.ctx is not None else None
    if message.startswith("No such command") and isinstance(group, click.Group) and group is not leasehold:
        message = f"{message.partition('.')[0]}: write one of {', '.join(group.commands)}"
    line = f"leasehold: {one_line(message).removesuffix('.')}"
    if isinstance(error, click.UsageError) and error.ctx is not None and not line.endswith("`?"):
        line += f"{' See' if line.endswith('?') else ': see'} `{error.ctx.command_path} --help`"
    return line
