"""``leasehold checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.verb import CommandOptions, command_options, dry_run_option, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command()
@click.argument("workload")
@dry_run_option
@command_options
@verb
def checkpoint(client: Client, workload: str, dry_run: bool, options: CommandOptions) -> None:
    """Checkpoint the application of a running workload, which keeps running.

    The application must implement leasehold_client.kernel.
    """
    from leasehold_client.cli.conclusion import conclude, conclude_plan

    if dry_run:
        conclude_plan(client, client.plan_checkpoint(workload), workload, "checkpoint", options)
        return
    command = client.checkpoint(workload, timeout_s=options.timeout_s)
    conclude(client, command, workload, options)
