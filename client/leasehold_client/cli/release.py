"""``leasehold release``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.names import complete_workloads
from leasehold_client.cli.parameter_types import SingleOption
from leasehold_client.cli.verb import CommandOptions, command_options, verb
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command(epilog=examples("leasehold release taken", "leasehold release --hold c-5c1e0f"))
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...", shell_complete=complete_workloads)
@click.option(
    "--hold",
    "hold_id",
    cls=SingleOption,
    metavar="ID",
    help="Give up this hold instead: its GPUs become free.",
)
@command_options
@verb
def release(client: Client, workloads: Sequence[str], hold_id: str | None, options: CommandOptions) -> None:
    """Release an adopted or claimed workload: its processes keep running, and its lease ends."""
    from leasehold_client.cli.conclusion import conclude, conclude_all

    if (not workloads) == (hold_id is None):
        raise UsageError("give either a workload or --hold")
    ask = partial(client.release, timeout_s=options.timeout_s)
    if hold_id is not None:
        conclude(client, client.release_hold(hold_id, timeout_s=options.timeout_s), hold_id, options)
    elif len(workloads) == 1:
        conclude(client, ask(workloads[0]), workloads[0], options)
    else:
        conclude_all(client, [(name, partial(ask, name)) for name in dict.fromkeys(workloads)], options)
