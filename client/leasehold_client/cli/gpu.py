"""``leasehold gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.cordon_targets import find_targets
from leasehold_client.cli.lookups import known_gpus
from leasehold_client.cli.verb import CommandOptions, command_options, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.group()
def gpu() -> None:
    """Manage the recorded health of GPUs."""


@gpu.command("reset-health")
@click.argument("names", nargs=-1, required=True, metavar="GPU...")
@command_options
@verb
def reset_health(client: Client, names: Sequence[str], options: CommandOptions) -> None:
    """Reset the recorded health of GPUs. The next check finds a persisting problem again.

    A GPU is a UUID, a unique prefix of a UUID, or worker/slot.
    """
    from leasehold_client.cli.conclusion import conclude_targets

    found = find_targets(names, (), known_gpus(client))
    create = partial(client.reset_gpu_health, timeout_s=options.timeout_s)
    conclude_targets(client, found, create, options)
