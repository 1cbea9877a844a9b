"""``leasehold adopt``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from leasehold_client.cli.eviction_options import Eviction, adoption_options
from leasehold_client.cli.verb import output_option, timeout_option, verb, waiting_options

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client
    from leasehold_client.coordinator.command_watch import Waiting


PID_LIMIT: Final = 2**22
"""The most that Linux gives out."""


@click.command()
@click.option("--worker", required=True, help="On whose host it runs, by name or id.")
@click.option(
    "--pid", required=True, type=click.IntRange(1, PID_LIMIT), metavar="PID", help="Its process id there."
)
@click.option("--name", default="", help="What to call it.  [default: made up]")
@adoption_options
@waiting_options()
@timeout_option
@output_option
@verb
def adopt(
    client: Client,
    worker: str,
    pid: int,
    name: str,
    eviction: Eviction,
    waiting: Waiting,
    timeout_s: float | None,
    output: str,
) -> None:
    """Take in a process that runs already on a worker's host, as a workload.

    Its descendants are taken in with it, and it leases the GPUs that it uses.
    """
    from leasehold_client.cli.conclusion import conclude

    workload, command = client.adopt(
        pid,
        worker=worker,
        name=name,
        eviction=eviction.policy,
        hooks=eviction.hooks,
        timeout_s=timeout_s,
    )
    conclude(client, command, workload.name, waiting=waiting, output=output)
