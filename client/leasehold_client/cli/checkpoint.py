"""``leasehold checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.verb import dry_run_option, output_option, timeout_option, verb, waiting_options

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client
    from leasehold_client.coordinator.command_watch import Waiting


@click.command()
@click.argument("workload")
@dry_run_option
@waiting_options()
@timeout_option
@output_option
@verb
def checkpoint(
    client: Client, workload: str, dry_run: bool, waiting: Waiting, timeout_s: float | None, output: str
) -> None:
    """Checkpoint the application of a running workload, which keeps running.

    The application must implement leasehold_client.kernel.
    """
    from leasehold_client.cli.conclusion import conclude, conclude_plan

    if dry_run:
        conclude_plan(client, client.plan_checkpoint(workload), workload, "checkpoint", output=output)
        return
    command = client.checkpoint(workload, timeout_s=timeout_s)
    conclude(client, command, workload, waiting=waiting, output=output)
