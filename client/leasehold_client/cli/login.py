"""``leasehold login``."""

from __future__ import annotations

import os
import re
import stat
import sys
from typing import TYPE_CHECKING, Final

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import fail
from leasehold_client.cli.names import complete_files
from leasehold_client.cli.parameter_types import not_empty
from leasehold_client.cli.verb import warn_of_settings
from leasehold_client.contexts import read_contexts
from leasehold_client.display.standard_output import echo_done, require_open
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from leasehold.v1.enrolment_service_pb2 import JoinTicket

_CONTEXT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def _context_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    not_empty(ctx, param, value)
    if value and not _CONTEXT_NAME.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is no name of a context: write up to 64 letters, digits and ._@-, beginning with a "
            "letter or a digit",
            ctx,
            param,
        )
    return value


@click.command(
    epilog=examples(
        "leasehold login --token alice.token", "ssh head cat alice.token | leasehold login --token -"
    )
)
@click.option(
    "--token",
    "source",
    required=True,
    callback=not_empty,
    shell_complete=complete_files,
    metavar="FILE|-",
    help="File with the join token; - reads it from standard input.",
)
@click.option("--name", default="", callback=not_empty, help="Your name, if the token is for a pattern.")
@click.option(
    "--context",
    default="",
    callback=_context_name,
    metavar="NAME",
    help="Name of the context.  [default: your name]",
)
def login(source: str, name: str, context: str) -> None:
    """Get a client certificate by a join token, and keep it in a context.

    The context becomes the current one, so later verbs use its coordinator and certificate. An admin creates
    the token with `leasehold token create --user NAME` or `--service NAME`.
    """
    from leasehold_client.coordinator import login as enrolment

    try:
        require_open()
        ticket: JoinTicket = enrolment.read_ticket(_read(source, enrolment.TICKET_LIMIT))
        earlier = {one.certificate for one in read_contexts().by_name.values()}
        made = enrolment.login(ticket, name, context)
        done = f"logged in to {made.coordinator}"
        if made.certificate in earlier:
            done = f"the token was used before, and its certificate is valid at {made.coordinator}"
        echo_done(f"{made.identity}: {done}; the context {made.name} is the current one")
    except LeaseholdError as error:
        fail(error)
    warn_of_settings(made.name)


def _read(source: str, limit: int) -> str:
    """The token.

    Raises:
        UsageError: It can't be read.
    """
    try:
        if source == "-":
            return sys.stdin.readline(limit)
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="ascii", errors="replace") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(
                    f"{source} is not a regular file: write the join token into one, or use `--token -`"
                )
            return file.read(limit)
    except (OSError, UnicodeDecodeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        what = "it is the token itself" if source.startswith("leasehold-join-") else f"{source}: {why}"
        raise UsageError(
            f"the join token can't be read ({what}): name a file that has it, or - for standard input; other "
            "users of this host can see arguments"
        ) from error
