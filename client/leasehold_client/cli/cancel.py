"""``leasehold cancel``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click

from leasehold_client.cli.verb import (
    output_option,
    verb,
    waiting_options,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from leasehold_client.coordinator.client import Client
    from leasehold_client.coordinator.command_watch import Waiting

Shown = TypeVar("Shown", bound="Message")


@click.command()
@click.argument("command_id", metavar="COMMAND")
@waiting_options("Return once the cancellation is requested, before the command has ended.")
@output_option
@verb
def cancel(client: Client, command_id: str, waiting: Waiting, output: str) -> None:
    """Cancel a command that has not ended.

    The command is rolled back. If it is past its point of no return, it is finished instead, and the exit
    code is 1.
    """
    from leasehold_client.cli.conclusion import conclude_cancel

    conclude_cancel(client, client.cancel(command_id), waiting=waiting, output=output)
