"""``leasehold release``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.verb import output_option, timeout_option, verb, waiting_options

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client
    from leasehold_client.coordinator.command_watch import Waiting


@click.command()
@click.argument("workload")
@waiting_options()
@timeout_option
@output_option
@verb
def release(client: Client, workload: str, waiting: Waiting, timeout_s: float | None, output: str) -> None:
    """Release an adopted or claimed workload: its processes keep running, and its lease ends."""
    from leasehold_client.cli.conclusion import conclude

    command = client.release(workload, timeout_s=timeout_s)
    conclude(client, command, workload, waiting=waiting, output=output)
