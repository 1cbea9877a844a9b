"""``leasehold adopt``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from leasehold_client.cli.eviction_options import Eviction, adoption_options
from leasehold_client.cli.examples import examples
from leasehold_client.cli.names import complete_workers
from leasehold_client.cli.parameter_types import Number, SingleOption
from leasehold_client.cli.verb import CommandOptions, command_options, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


PID_LIMIT: Final = 2**22
"""Largest process id on Linux."""


@click.command(epilog=examples("leasehold adopt --worker alpha --pid 4711 --name taken"))
@click.option(
    "--worker",
    cls=SingleOption,
    required=True,
    help="Name or id of the worker on the process's host.",
    shell_complete=complete_workers,
)
@click.option(
    "--pid", required=True, type=Number(1, PID_LIMIT), metavar="PID", help="Process id on that host."
)
@click.option("--name", default="", help="Name of the workload.  [default: generated]")
@adoption_options
@command_options
@verb
def adopt(
    client: Client,
    worker: str,
    pid: int,
    name: str,
    eviction: Eviction,
    options: CommandOptions,
) -> None:
    """Adopt a running process of a worker's host as a workload.

    The workload includes the descendants of the process, and leases the GPUs that these processes use.
    """
    from leasehold_client.cli.conclusion import conclude

    workload, command = client.adopt(
        pid,
        worker=worker,
        name=name,
        eviction=eviction.policy,
        hooks=eviction.hooks,
        timeout_s=options.timeout_s,
    )
    conclude(client, command, workload.name, options)
