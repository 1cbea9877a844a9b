"""``leasehold cordon`` and ``leasehold uncordon``."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.cordon_targets import find_targets
from leasehold_client.cli.lookups import known_gpus
from leasehold_client.cli.verb import output_option, timeout_option, verb, waiting_options

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client
    from leasehold_client.coordinator.command_watch import Waiting


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--reason", required=True, help="Reason, which lists and refusals show.")
@waiting_options()
@timeout_option
@output_option
@verb
def cordon(
    client: Client,
    targets: Sequence[str],
    reason: str,
    waiting: Waiting,
    timeout_s: float | None,
    output: str,
) -> None:
    """Take GPUs or whole workers out of service: leases stay, and no new ones are granted.

    A TARGET is a GPU (a UUID, a unique prefix of a UUID, or worker/slot) or a worker (a name or an id).
    """
    from leasehold_client.cli.conclusion import conclude_targets

    found = find_targets(targets, client.workers(), known_gpus(client))
    create = partial(client.cordon, reason=reason, cordoned_by=_caller(), timeout_s=timeout_s)
    conclude_targets(client, found, create, waiting=waiting, output=output)


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@waiting_options()
@timeout_option
@output_option
@verb
def uncordon(
    client: Client, targets: Sequence[str], waiting: Waiting, timeout_s: float | None, output: str
) -> None:
    """Put GPUs or whole workers back into service.

    A TARGET is a GPU (a UUID, a unique prefix of a UUID, or worker/slot) or a worker (a name or an id). To
    uncordon a worker does not uncordon GPUs that have a cordon of their own.
    """
    from leasehold_client.cli.conclusion import conclude_targets

    found = find_targets(targets, client.workers(), known_gpus(client))
    create = partial(client.uncordon, timeout_s=timeout_s)
    conclude_targets(client, found, create, waiting=waiting, output=output)


def _caller() -> str:
    """The calling user as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
