"""``leasehold release``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.verb import CommandOptions, command_options, verb
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command()
@click.argument("workload", required=False)
@click.option("--hold", "hold_id", metavar="ID", help="Give up this hold instead: its GPUs become free.")
@command_options
@verb
def release(client: Client, workload: str | None, hold_id: str | None, options: CommandOptions) -> None:
    """Release an adopted or claimed workload: its processes keep running, and its lease ends."""
    from leasehold_client.cli.conclusion import conclude

    if (workload is None) == (hold_id is None):
        raise UsageError("give either a workload or --hold")
    if workload is not None:
        conclude(client, client.release(workload, timeout_s=options.timeout_s), workload, options)
    elif hold_id is not None:
        conclude(client, client.release_hold(hold_id, timeout_s=options.timeout_s), hold_id, options)
