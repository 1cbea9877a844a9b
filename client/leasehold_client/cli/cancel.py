"""``leasehold cancel``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import error_line, interrupted, raise_all
from leasehold_client.cli.names import complete_open_commands
from leasehold_client.cli.verb import CommandOptions, command_options, verb
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, NoCoordinatorError

if TYPE_CHECKING:
    from leasehold.v1.command_pb2 import Command

    from leasehold_client.coordinator.client import Client


@click.command(
    epilog=examples(
        "leasehold cancel c-5c1e0f",
        "leasehold cancel $(leasehold get commands -q --filter 'state = PENDING')",
    )
)
@click.argument(
    "command_ids", nargs=-1, required=True, metavar="COMMAND...", shell_complete=complete_open_commands
)
@partial(
    command_options,
    no_wait_help="Return once the cancellation is requested, before the command has ended.",
    has_timeout=False,
)
@verb
def cancel(client: Client, command_ids: Sequence[str], options: CommandOptions) -> None:
    """Cancel commands that have not ended.

    A command is rolled back. If it is past its point of no return, it is finished instead, and the exit
    code is 1.
    """
    from leasehold_client.cli.cancel_conclusion import conclude_cancel

    commands: list[Command] = []
    refusals: list[LeaseholdError] = []
    ids = list(dict.fromkeys(command_ids))
    for command_id in ids:
        try:
            commands.append(client.cancel(command_id))
        except (NoCoordinatorError, KeyboardInterrupt) as error:
            for refusal in refusals:
                echo_error(error_line(refusal.message, refusal.reason))
            done = ", ".join(one.command_id for one in commands)
            stored = f"the cancellation of {done} is stored" if done else ""
            if isinstance(error, KeyboardInterrupt):
                interrupted(stored or "a cancellation that was stored continues")
            error.message += f"; {stored}" if stored else ""
            raise
        except LeaseholdError as error:
            refusals.append(error)
    try:
        if commands:
            conclude_cancel(client, commands, options, is_list=len(ids) > 1)
    except (SystemExit, LeaseholdError):
        for refusal in refusals:
            echo_error(error_line(refusal.message, refusal.reason))
        raise
    raise_all(refusals)
