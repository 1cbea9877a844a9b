"""``leasehold release``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.verb import CommandOptions, command_options, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command()
@click.argument("workload")
@command_options
@verb
def release(client: Client, workload: str, options: CommandOptions) -> None:
    """Release an adopted or claimed workload: its processes keep running, and its lease ends."""
    from leasehold_client.cli.conclusion import conclude

    command = client.release(workload, timeout_s=options.timeout_s)
    conclude(client, command, workload, options)
