"""``leasehold cancel``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.verb import CommandOptions, command_options, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command()
@click.argument("command_id", metavar="COMMAND")
@partial(
    command_options,
    no_wait_help="Return once the cancellation is requested, before the command has ended.",
    has_timeout=False,
)
@verb
def cancel(client: Client, command_id: str, options: CommandOptions) -> None:
    """Cancel a command that has not ended.

    The command is rolled back. If it is past its point of no return, it is finished instead, and the exit
    code is 1.
    """
    from leasehold_client.cli.conclusion import conclude_cancel

    conclude_cancel(client, client.cancel(command_id), options)
