"""``leasehold cordon`` and ``leasehold uncordon``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.cordon_targets import find_targets
from leasehold_client.cli.caller import caller
from leasehold_client.cli.lookups import known_gpus
from leasehold_client.cli.verb import CommandOptions, command_options, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--reason", required=True, help="Reason, which lists and refusals show.")
@command_options
@verb
def cordon(
    client: Client,
    targets: Sequence[str],
    reason: str,
    options: CommandOptions,
) -> None:
    """Take GPUs or whole workers out of service: leases stay, and no new ones are granted.

    A TARGET is a GPU (a UUID, a unique prefix of a UUID, or worker/slot) or a worker (a name or an id).
    """
    from leasehold_client.cli.conclusion import conclude_targets

    found = find_targets(targets, client.workers(), known_gpus(client))
    create = partial(client.cordon, reason=reason, cordoned_by=caller(), timeout_s=options.timeout_s)
    conclude_targets(client, found, create, options)


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@command_options
@verb
def uncordon(client: Client, targets: Sequence[str], options: CommandOptions) -> None:
    """Put GPUs or whole workers back into service.

    A TARGET is a GPU (a UUID, a unique prefix of a UUID, or worker/slot) or a worker (a name or an id). To
    uncordon a worker does not uncordon GPUs that have a cordon of their own.
    """
    from leasehold_client.cli.conclusion import conclude_targets

    found = find_targets(targets, client.workers(), known_gpus(client))
    create = partial(client.uncordon, timeout_s=options.timeout_s)
    conclude_targets(client, found, create, options)
