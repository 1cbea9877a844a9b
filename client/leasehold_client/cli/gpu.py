"""``leasehold gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.cordon_targets import find_targets
from leasehold_client.arguments.gpu_names import resolve_gpu
from leasehold_client.cli.examples import examples
from leasehold_client.cli.lookups import gpus_to_name
from leasehold_client.cli.names import complete_gpus
from leasehold_client.cli.verb import CommandOptions, command_options, verb
from leasehold_client.display.standard_output import echo

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.group()
def gpu() -> None:
    """Manage the recorded health of GPUs, and the GPUs of enrolled workers."""


@gpu.command(
    "unbind",
    epilog=examples(
        "leasehold gpu unbind GPU-6b1f0000-0000-0000-0000-000000000000", "leasehold gpu unbind alpha/0"
    ),
)
@click.argument("name", metavar="GPU", shell_complete=complete_gpus)
@verb
def unbind(client: Client, name: str) -> None:
    """Unbind a GPU from the name of an enrolled worker, so that another worker may have the GPU.

    The worker that has the GPU must not be connected. A GPU is a whole UUID, or worker/slot of a listed GPU.
    """
    uuid, shown = name, name
    if "/" in name:  # a prefix could match a listed GPU in the place of an unlisted one
        with gpus_to_name(client) as gpus:
            uuid = resolve_gpu(name, gpus)
        shown = f"{name} ({uuid})"
    identity = client.enrolment.unbind_gpu(uuid)
    echo(f"{shown}: unbound from {identity}")


@gpu.command("reset-health", epilog=examples("leasehold gpu reset-health alpha/0"))
@click.argument("names", nargs=-1, required=True, metavar="GPU...", shell_complete=complete_gpus)
@command_options
@verb
def reset_health(client: Client, names: Sequence[str], options: CommandOptions) -> None:
    """Reset the recorded health of GPUs. The next check finds a persisting problem again.

    A GPU is a UUID, a unique prefix of a UUID, or worker/slot.
    """
    from leasehold_client.cli.conclusion import conclude_targets

    with gpus_to_name(client) as gpus:
        found = find_targets(names, (), gpus)
    create = partial(client.reset_gpu_health, timeout_s=options.timeout_s)
    conclude_targets(client, found, create, options, is_search=False)
