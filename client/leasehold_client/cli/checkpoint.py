"""``leasehold checkpoint``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.names import complete_running
from leasehold_client.cli.selection import Selection, selection_options
from leasehold_client.cli.verb import CommandOptions, command_options, dry_run_option, verb

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command(
    epilog=examples(
        "leasehold checkpoint trainer",
        "leasehold checkpoint trainer --dry-run",
        "leasehold checkpoint -l job=9",
    )
)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...", shell_complete=complete_running)
@selection_options
@dry_run_option
@command_options
@verb
def checkpoint(client: Client, selection: Selection, dry_run: bool, options: CommandOptions) -> None:
    """Checkpoint the applications of running workloads, which keep running.

    An application must implement leasehold_client.kernel. With --all, -l or --filter, the workloads with such
    an application are searched.
    """
    from leasehold_client.cli.conclusion import conclude, conclude_all
    from leasehold_client.cli.plan_conclusion import conclude_plans

    chosen = selection.find(client, lambda workload: workload.status.HasField("kernel"))
    if dry_run:
        plans = [(label, partial(client.plan_checkpoint, name)) for label, name in chosen]
        conclude_plans(client, plans, "checkpoint", options, is_search=selection.is_search)
        return
    ask = partial(client.checkpoint, timeout_s=options.timeout_s)
    if not selection.is_search and len(chosen) == 1:
        [(label, name)] = chosen
        conclude(client, ask(name), label, options)
    else:
        each = [(label, partial(ask, name)) for label, name in chosen]
        conclude_all(client, each, options, is_search=selection.is_search)
