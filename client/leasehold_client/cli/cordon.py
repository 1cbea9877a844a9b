"""``leasehold cordon`` and ``leasehold uncordon``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.cordon_targets import CordonTarget, find_targets
from leasehold_client.arguments.selectors import label_filter
from leasehold_client.cli.caller import caller
from leasehold_client.cli.examples import examples
from leasehold_client.cli.lookups import gpus_to_name
from leasehold_client.cli.names import complete_targets
from leasehold_client.cli.parameter_types import SingleOption
from leasehold_client.cli.verb import CommandOptions, command_options, verb
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


_targets_argument = click.argument(
    "targets", nargs=-1, metavar="[TARGET]...", shell_complete=complete_targets
)
_selector_option = click.option(
    "-l",
    "--selector",
    cls=SingleOption,
    default="",
    metavar="LABELS",
    help="All workers with these labels, such as rack=r1.",
)
_all_option = click.option("--all", "is_all", is_flag=True, help="All workers.")


@click.command(
    epilog=examples(
        'leasehold cordon alpha/1 --reason "fan is loud"', "leasehold cordon -l rack=r1 --reason maintenance"
    )
)
@_targets_argument
@_selector_option
@_all_option
@click.option("--reason", required=True, help="Reason, which lists and refusals show.")
@command_options
@verb
def cordon(
    client: Client,
    targets: Sequence[str],
    selector: str,
    is_all: bool,
    reason: str,
    options: CommandOptions,
) -> None:
    """Take GPUs or whole workers out of service: leases stay, and no new ones are granted.

    A TARGET is a GPU (a UUID, a unique prefix of a UUID, or worker/slot) or a worker (a name or an id).
    """
    from leasehold_client.cli.conclusion import conclude_targets

    found = _find(client, targets, selector, is_all=is_all)
    create = partial(client.cordon, reason=reason, cordoned_by=caller(), timeout_s=options.timeout_s)
    conclude_targets(client, found, create, options, is_search=not targets)


@click.command(epilog=examples("leasehold uncordon alpha/1", "leasehold uncordon --all"))
@_targets_argument
@_selector_option
@_all_option
@command_options
@verb
def uncordon(
    client: Client, targets: Sequence[str], selector: str, is_all: bool, options: CommandOptions
) -> None:
    """Put GPUs or whole workers back into service.

    A TARGET is a GPU (a UUID, a unique prefix of a UUID, or worker/slot) or a worker (a name or an id). To
    uncordon a worker does not uncordon GPUs that have a cordon of their own, and the reverse.
    """
    from leasehold_client.cli.conclusion import conclude_targets

    found = _find(client, targets, selector, is_all=is_all)
    create = partial(client.uncordon, timeout_s=options.timeout_s)
    conclude_targets(client, found, create, options, is_search=not targets)
    for name in [] if options.quiet else _still_cordoned(client, found):
        echo_error(
            f"leasehold: worker {name} has a cordon of its own, which keeps its GPUs out of service: "
            f"`leasehold uncordon {name}`"
        )


def _still_cordoned(client: Client, targets: Sequence[CordonTarget]) -> list[str]:
    """The names of cordoned workers of which only GPUs are targets."""
    whole = {target.worker_id for target in targets if not target.gpu_uuids}
    of_gpus = {target.worker_id for target in targets} - whole
    try:
        workers = [client.worker(worker_id) for worker_id in of_gpus]
    except LeaseholdError:  # the uncordon is done
        return []
    return [worker.name for worker in workers if worker.HasField("cordon")]


def _find(client: Client, names: Sequence[str], selector: str, *, is_all: bool) -> list[CordonTarget]:
    """Finds the targets.

    Raises:
        UsageError: Nothing is named, or a target and a search are given.
    """
    is_search = is_all or bool(selector)
    if bool(names) == is_search:
        raise UsageError("name either a GPU or a worker, or choose workers by -l or --all")
    if not is_search:
        with gpus_to_name(client) as gpus:
            return find_targets(names, client.workers(), gpus)
    workers = client.workers(filter=label_filter(selector))
    if not workers:
        echo_error("leasehold: no worker matches, so nothing was done")
    return [CordonTarget(worker.worker_id, (), worker.name) for worker in workers]
