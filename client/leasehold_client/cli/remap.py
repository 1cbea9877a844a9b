"""``leasehold remap``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.lookups import gpus_to_name
from leasehold_client.cli.names import complete_gpus, complete_running
from leasehold_client.cli.parameter_types import SingleOption
from leasehold_client.cli.verb import (
    CommandOptions,
    command_options,
    dry_run_option,
    lock_timeout_option,
    verb,
)

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command(
    epilog=examples(
        "leasehold remap one --to alpha/1",
        "leasehold remap one --pair alpha/0=alpha/3 --dry-run",
        "leasehold remap one two --swap",
    )
)
@click.argument("workloads", nargs=-1, required=True, metavar="WORKLOAD...", shell_complete=complete_running)
@click.option(
    "--pair",
    "pairs",
    multiple=True,
    metavar="OLD=NEW",
    help="Move the workload that holds GPU OLD from OLD to NEW; may be repeated.",
)
@click.option(
    "--to",
    cls=SingleOption,
    metavar="GPU,...",
    help="GPUs to move one workload to, in the workload's own order.",
    shell_complete=complete_gpus,
)
@click.option("--swap", is_flag=True, help="Exchange the GPUs of two workloads, in their own orders.")
@dry_run_option
@lock_timeout_option
@command_options
@verb
def remap(
    client: Client,
    workloads: Sequence[str],
    pairs: Sequence[str],
    to: str | None,
    swap: bool,
    dry_run: bool,
    lock_timeout_s: float | None,
    options: CommandOptions,
) -> None:
    """Move running workloads to other GPUs of their worker.

    One command moves all the workloads or none. A GPU is a UUID, a unique prefix of a UUID, or worker/slot.
    """
    from leasehold_client.arguments.moves import check_hosts, check_options, find_moves
    from leasehold_client.cli.conclusion import conclude
    from leasehold_client.cli.plan_conclusion import conclude_plan

    check_options(workloads, pairs, to, swap=swap)
    with gpus_to_name(client) as gpus:
        moves = find_moves(client, workloads, gpus, pairs=pairs, to=to, swap=swap)
        check_hosts(moves, workloads, gpus)
    names = ", ".join(workloads)
    if dry_run:
        plan = client.plan_remap(moves, lock_timeout_s=lock_timeout_s)
        conclude_plan(client, plan, names, "remap", options)
        return
    ask = partial(client.remap, moves, lock_timeout_s=lock_timeout_s, timeout_s=options.timeout_s)
    conclude(client, ask(), names, options, again=ask)
