"""Options and decorators that verbs share.

A verb imports gRPC and protobuf when it is called. Therefore ``--help`` and shell completion import neither,
which would take most of their time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import click

from leasehold_client import interrupts
from leasehold_client.cli.exit_codes import fail, interrupted, not_utf8
from leasehold_client.cli.names import complete_contexts, complete_preempted
from leasehold_client.cli.parameter_types import Seconds, SingleOption, not_empty, refuse_empty
from leasehold_client.config import COORDINATOR_VARIABLE, config_path, coordinator_in_file
from leasehold_client.contexts import CONTEXT_VARIABLE, chosen_coordinator, environment_context
from leasehold_client.display.standard_output import require_open
from leasehold_client.display.terminal_text import echo_error, one_line
from leasehold_client.errors import LeaseholdError, OutputError, UsageError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client

Arguments = ParamSpec("Arguments")

YEAR_S: Final = 366 * 86_400.0
WEEK_S: Final = 7 * 86_400.0
"""Largest timeout of a command, lock timeout and grace period (docs/protocol.md)."""

HOLD_LIMIT_S: Final = 600.0
"""Longest time of a hold."""

READY_LIMIT_S: Final = 600.0
"""Default of the longest wait for readiness."""


coordinator_option = click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="HOST:PORT, insecure:HOST:PORT or unix:PATH.  [default: as in cli.toml, or this user's coordinator]",
)
context_option = click.option(
    "--context",
    callback=not_empty,
    metavar="NAME",
    shell_complete=complete_contexts,
    help="Context with a client certificate, for TLS.  "
    "[default: LEASEHOLD_CONTEXT, or without --coordinator the current one]",
)
as_option = click.option(
    "--as",
    "on_behalf_of",
    default="",
    metavar="user/NAME",
    envvar="LEASEHOLD_AS",
    help="User for whom a service acts.  [default: the caller itself]",
)
output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="Output format; json and yaml have the field names of the protos.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0.001, WEEK_S),
    metavar="SECONDS",
    help="Longest time of the command in the queue and in execution.",
)
lock_timeout_option = click.option(
    "--lock-timeout",
    "lock_timeout_s",
    type=Seconds(0.001, WEEK_S),
    metavar="SECONDS",
    help="Longest time for submitted GPU work to drain. A cancellation waits for its end.  [default: 10]",
)
hold_option = click.option(
    "--hold",
    "hold_id",
    cls=SingleOption,
    default="",
    metavar="ID",
    help="Take the GPUs of this hold, which `suspend --hold-for` printed.",
)
preempt_option = click.option(
    "--preempt",
    cls=SingleOption,
    default="",
    metavar="WORKLOAD,...",
    shell_complete=complete_preempted,
    help="Suspend these workloads first, and restore them if the start fails.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show the plan and its refusals; change nothing."
)


def warn_of_settings(context: str) -> None:
    """Tells on standard error how settings and the current context hide each other.

    Args:
        context: The current context. Empty: there is none.
    """
    _warn_of_variables(context)
    with suppress(UsageError):  # the file has no effect beside a context
        if context and (address := coordinator_in_file()):
            echo_error(
                f"leasehold: the context {context} comes before the coordinator {address} in "
                f"{config_path()}, which has no effect"
            )


def _warn_of_variables(context: str) -> None:
    address = os.environ.get(COORDINATOR_VARIABLE)
    name = environment_context(address)
    hiding = []
    if context and address and name != context:
        hiding.append(COORDINATOR_VARIABLE)
    wanted = os.environ.get(CONTEXT_VARIABLE) if context else name
    if wanted and wanted != context:
        hiding.append(CONTEXT_VARIABLE)
    if hiding:
        chosen = f"the context {name}" if name else f"the coordinator {address}"
        current = "the current context" if context else "no context"
        echo_error(
            f"leasehold: the environment chooses {chosen}: unset {' and '.join(hiding)} to use {current}"
        )


def workload_list(text: str) -> list[str]:
    """The names or ids of an option, separated by commas. Empty: none.

    Raises:
        UsageError: One of several is empty.
    """
    names = text.split(",") if text else []
    if "" in names:
        raise UsageError(f"{text!r} has an empty name: separate names by one comma each")
    return names


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """Options of every verb that creates a command.

    Attributes:
        wait: Whether the verb waits for the end of the command.
        wait_s: Longest wait. None: until the command has been UNKNOWN for 30 s beyond its own timeout.
        timeout_s: Timeout of the command itself. None: the coordinator's default.
        output: Output format: ``table``, ``json`` or ``yaml``.
        quiet: Whether success prints nothing but the ids of what was created.
    """

    wait: bool
    wait_s: float | None
    timeout_s: float | None
    output: str
    quiet: bool = False

    @property
    def is_document(self) -> bool:
        """Whether the output is for programs: JSON or YAML."""
        return self.output != "table"

    @property
    def needs_output(self) -> bool:
        """Whether success prints something."""
        return self.is_document or not self.quiet or not self.wait

    @property
    def is_told(self) -> bool:
        """Whether the outcome is printed for people."""
        return not self.quiet and not self.is_document


def command_options(
    function: Callable[..., None],
    *,
    no_wait_help: str = "Return once the command is stored, before its execution.",
    has_timeout: bool = True,
) -> Callable[..., None]:
    """Adds the options of a command to a verb, as the argument ``options``: :class:`CommandOptions`."""

    @click.option("--no-wait", is_flag=True, help=no_wait_help)
    @click.option(
        "--wait-timeout",
        "wait_timeout_s",
        type=Seconds(0, YEAR_S),
        metavar="SECONDS",
        help="Longest wait for the end; then exit with 4, and the command continues.",
    )
    @click.option("-q", "--quiet", is_flag=True, help="Print only errors, dry runs, and ids with --no-wait.")
    @output_option
    @wraps(function)
    def call(
        *positional: Any,
        no_wait: bool,
        wait_timeout_s: float | None,
        output: str,
        quiet: bool,
        timeout_s: float | None = None,
        **named: Any,
    ) -> None:
        options = CommandOptions(not no_wait, wait_timeout_s, timeout_s, output, quiet)
        function(*positional, options=options, **named)

    return timeout_option(call) if has_timeout else call


def _announced(address: str) -> Callable[[LeaseholdError], None]:
    """A function that tells the user of the first wait of a verb, and of no other."""
    from leasehold_client.coordinator.retry import is_outage, retry_limit_s

    told = False

    def tell(error: LeaseholdError) -> None:
        nonlocal told
        if not told:
            told = True
            why = f" for a coordinator at {address}" if is_outage(error) else f": {error.message}"
            echo_error(one_line(f"leasehold: waiting up to {retry_limit_s(error):g} s{why}"))

    return tell


def verb(function: Callable[Concatenate[Client, Arguments], None]) -> Callable[..., None]:
    """Connects a verb to the coordinator, and turns any error into one line and an exit code.

    A closed standard output is refused before any call, since it would hide what the verb has changed. If a
    later write fails, the error says that the change was made.
    """

    @coordinator_option
    @context_option
    @as_option
    @wraps(function)
    def call(
        coordinator: str | None,
        context: str | None,
        on_behalf_of: str,
        *positional: Arguments.args,
        **named: Arguments.kwargs,
    ) -> None:
        from leasehold_client.cli.lookups import with_short_names
        from leasehold_client.coordinator.client import Client

        interrupts.raise_in_call()
        refuse_empty(click.get_current_context())
        try:
            options = named.get("options")  # those of a verb that creates commands
            if not isinstance(options, CommandOptions) or options.needs_output:
                require_open()
            address, found = chosen_coordinator(coordinator, context)
            name = found.name if found is not None else None
            with Client(address, _announced(address), name, on_behalf_of) as client:
                try:
                    function(client, *positional, **named)
                except OutputError as error:
                    if client.has_changed:
                        error.message += (
                            "; the change was made"
                            if options is None
                            else "; the request was stored: `leasehold get commands` shows its outcome"
                        )
                    raise
                except LeaseholdError as error:
                    error.message = with_short_names(client, error.message)
                    raise
        except LeaseholdError as error:
            fail(error)
        except UnicodeEncodeError as error:  # a message only holds valid text
            fail(not_utf8(error))
        except KeyboardInterrupt:
            if options is not None:
                interrupted("a command that was stored continues: `leasehold get commands` shows it")
            interrupted()

    return call
