"""``leasehold logs``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED
from leasehold_client.cli.verb import verb
from leasehold_client.display import standard_output

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command()
@click.argument("workload")
@click.option("-f", "--follow", "follow_output", is_flag=True, help="Continue until the workload has ended.")
@verb
def logs(client: Client, workload: str, follow_output: bool) -> None:
    """Print the output of a workload."""
    try:
        for data in client.output(workload, follow=follow_output):
            if not standard_output.write(data):
                break
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # no command continues, so there is nothing to say
