"""The verbs that take GPUs and workers out of service, and put them back."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cordon_targets import CordonTarget, find_gpu_targets, find_targets
from leasehold_client.moving import known_gpus
from leasehold_client.verb import output_option, timeout_option, verb, waiting_options

if TYPE_CHECKING:
    from leasehold.v1.command_pb2 import Command

    from leasehold_client.client import Client
    from leasehold_client.watching import Waiting


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--reason", required=True, help="Why: it is shown wherever somebody wonders.")
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
    """Take GPUs or whole workers out of service: who has a GPU keeps it, and nobody gets a new one.

    A TARGET is a GPU by UUID, a unique beginning of one or worker/slot, or a worker by name or id.
    """
    from leasehold_client.conclusion import conclude_all

    found = find_targets(targets, client.workers(), known_gpus(client))
    create = partial(client.cordon, reason=reason, cordoned_by=_caller(), timeout_s=timeout_s)
    conclude_all(client, _each(found, create), waiting=waiting, output=output)


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

    A TARGET is a GPU by UUID, a unique beginning of one or worker/slot, or a worker by name or id. GPUs that
    were cordoned one by one stay so when their worker is put back.
    """
    from leasehold_client.conclusion import conclude_all

    found = find_targets(targets, client.workers(), known_gpus(client))
    create = partial(client.uncordon, timeout_s=timeout_s)
    conclude_all(client, _each(found, create), waiting=waiting, output=output)


@click.group()
def gpu() -> None:
    """Look after single GPUs: forget what is known against their health."""


@gpu.command("reset-health")
@click.argument("names", nargs=-1, required=True, metavar="GPU...")
@waiting_options()
@timeout_option
@output_option
@verb
def reset_health(
    client: Client, names: Sequence[str], waiting: Waiting, timeout_s: float | None, output: str
) -> None:
    """Forget what is known against GPUs. What is still the case is found again by the next look.

    A GPU is a UUID, a unique beginning of one, or worker/slot.
    """
    from leasehold_client.conclusion import conclude_all

    found = find_gpu_targets(names, known_gpus(client))
    create = partial(client.reset_gpu_health, timeout_s=timeout_s)
    conclude_all(client, _each(found, create), waiting=waiting, output=output)


def _each(
    targets: Sequence[CordonTarget], create: Callable[[str, Sequence[str]], Command]
) -> list[tuple[str, Callable[[], Command]]]:
    return [(target.label, partial(create, target.worker_id, target.gpu_uuids)) for target in targets]


def _caller() -> str:
    """Who calls, as people know them: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
