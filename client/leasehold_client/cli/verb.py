"""What every verb has: its client, its options, and one way to fail.

What a verb needs besides its options is imported when the verb is called. So ``--help`` and the completion of
a shell need neither gRPC nor protobuf, which take most of a verb's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import click

from leasehold_client import interrupts
from leasehold_client.cli.exit_codes import fail, interrupted
from leasehold_client.config import configured_coordinator, parse_address
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client

Arguments = ParamSpec("Arguments")

YEAR_S: Final = 366 * 86_400.0
WEEK_S: Final = 7 * 86_400.0
"""The most that a command's timeout, a lock timeout and a grace may be (docs/protocol.md)."""

READY_LIMIT_S: Final = 600.0
"""How long a workload that was started is waited for until it is ready, if nothing else is said."""


class Seconds(click.FloatRange):
    """A time in seconds, of a year at most."""

    name = "number of seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Reads the number, or fails with the rule."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a time: write seconds, such as 30", param, ctx)
        return seconds


coordinator_option = click.option(
    "--coordinator",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_COORDINATOR",
    help="Coordinator to talk to.  [default: 127.0.0.1:7400, or as cli.toml says]",
)
output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print; json has the names of the protos.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0.001, max=WEEK_S),
    metavar="SECONDS",
    help="How long the command may wait and take.",
)
lock_timeout_option = click.option(
    "--lock-timeout",
    "lock_timeout_s",
    type=Seconds(min=0.001, max=WEEK_S),
    metavar="SECONDS",
    help="How long submitted GPU work may take to drain.  [default: 10]",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, and what refuses it; change nothing."
)


def waiting_options(
    no_wait_help: str = "Return once the command is stored, before it is carried out.",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb the options of waiting for its command, as its argument ``waiting``."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @click.option("--no-wait", is_flag=True, help=no_wait_help)
        @click.option(
            "--wait-timeout",
            "wait_timeout_s",
            type=Seconds(min=0, max=YEAR_S),
            metavar="SECONDS",
            help="How long to wait for its end; then exit with 4, and it goes on.",
        )
        @wraps(function)
        def call(*positional: Any, no_wait: bool, wait_timeout_s: float | None, **named: Any) -> None:
            from leasehold_client.coordinator.command_watch import Waiting

            function(*positional, waiting=Waiting(not no_wait, wait_timeout_s), **named)

        return call

    return decorate


def verb(function: Callable[Concatenate[Client, Arguments], None]) -> Callable[..., None]:
    """Gives a verb its client, and turns every error into one line and an exit code."""

    @coordinator_option
    @wraps(function)
    def call(coordinator: str | None, *positional: Arguments.args, **named: Arguments.kwargs) -> None:
        from leasehold_client.cli.lookups import with_short_names
        from leasehold_client.coordinator.client import Client

        interrupts.raise_in_verb()
        try:
            with Client(parse_address(coordinator or configured_coordinator())) as client:
                try:
                    function(client, *positional, **named)
                except LeaseholdError as error:
                    error.message = with_short_names(client, error.message)
                    raise
        except LeaseholdError as error:
            fail(error)
        except UnicodeEncodeError as error:  # a message holds text
            fail(UsageError(f"{error.object!r} is not valid UTF-8: give text, or put the bytes into a file"))
        except KeyboardInterrupt:
            interrupted("what was asked for before goes on: `leasehold get commands` shows it")

    return call
