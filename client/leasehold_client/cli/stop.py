"""``leasehold stop``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.parameter_types import Seconds
from leasehold_client.cli.verb import WEEK_S, CommandOptions, command_options, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command()
@click.argument("workload")
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(0, WEEK_S),
    metavar="SECONDS",
    help="Grace period between SIGTERM and SIGKILL.  [default: 10]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Kill restored processes even if they can't be suspended first, which can hang their host.",
)
@command_options
@verb
def stop(
    client: Client,
    workload: str,
    grace_s: float | None,
    force: bool,
    options: CommandOptions,
) -> None:
    """Stop a workload. A suspended workload is killed at once, since it can't handle SIGTERM."""
    from leasehold_client.cli.conclusion import conclude

    command = client.stop(workload, grace_s=grace_s, force=force, timeout_s=options.timeout_s)
    conclude(client, command, workload, options)
