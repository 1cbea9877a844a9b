"""``leasehold restore``, also called ``leasehold wake``."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.gpu_names import resolve_list
from leasehold_client.cli.examples import examples
from leasehold_client.cli.lookups import gpus_to_name
from leasehold_client.cli.names import complete_gpus, complete_parked
from leasehold_client.cli.parameter_types import SingleOption
from leasehold_client.cli.selection import Selection, selection_options
from leasehold_client.cli.verb import (
    CommandOptions,
    command_options,
    dry_run_option,
    hold_option,
    preempt_option,
    verb,
    workload_list,
)
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command(
    epilog=examples(
        "leasehold restore one",
        "leasehold restore one --to alpha/1 --dry-run",
        "leasehold restore one two",
        "leasehold restore --all",
    )
)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...", shell_complete=complete_parked)
@selection_options
@click.option(
    "--to",
    cls=SingleOption,
    metavar="GPU,...",
    help="GPUs to restore one workload on, in its own order.",
    shell_complete=complete_gpus,
)
@click.option(
    "--checkpoint",
    "checkpoint_id",
    cls=SingleOption,
    default="",
    metavar="ID",
    help="Checkpoint that a STOPPED workload starts from.  [default: its newest intact one]",
)
@hold_option
@preempt_option
@dry_run_option
@command_options
@verb
def restore(
    client: Client,
    selection: Selection,
    to: str | None,
    checkpoint_id: str,
    hold_id: str,
    preempt: str,
    dry_run: bool,
    options: CommandOptions,
) -> None:
    """Restore suspended workloads on their former GPUs, or else on free GPUs of the same chip.

    The steps of the suspend are undone in reverse order. With --all, -l or --filter, the suspended workloads
    are searched.

    `leasehold wake` and `leasehold restore` are the same.
    """
    from leasehold_client.arguments.moves import check_host
    from leasehold_client.cli.conclusion import conclude, conclude_all
    from leasehold_client.cli.plan_conclusion import conclude_plans
    from leasehold_client.messages import PARKED

    chosen = selection.find(client, lambda workload: workload.status.state in PARKED)
    if (selection.is_search or len(chosen) > 1) and (to or checkpoint_id or hold_id or preempt):
        raise UsageError("--to, --checkpoint, --hold and --preempt are for one workload: name one")
    uuids: list[str] = []
    if to is not None:
        with gpus_to_name(client) as gpus:
            uuids = resolve_list(to, gpus)
            check_host(client.workload(chosen[0][1]), chosen[0][0], uuids, gpus)
    if dry_run and preempt:
        raise UsageError("--dry-run and --preempt exclude each other: plan each suspend and the restore")
    if dry_run:
        plan = partial(client.plan_restore, gpu_uuids=uuids, checkpoint_id=checkpoint_id, hold_id=hold_id)
        verb_name = click.get_current_context().info_name or ""
        plans = [(label, partial(plan, name)) for label, name in chosen]
        conclude_plans(client, plans, verb_name, options, is_search=selection.is_search)
        return
    ask = partial(
        client.restore,
        gpu_uuids=uuids,
        checkpoint_id=checkpoint_id,
        hold_id=hold_id,
        preempt=workload_list(preempt),
        timeout_s=options.timeout_s,
    )
    if not selection.is_search and len(chosen) == 1:
        [(label, name)] = chosen
        conclude(client, ask(name), label, options)
    else:
        each = [(label, partial(ask, name)) for label, name in chosen]
        conclude_all(client, each, options, is_search=selection.is_search)


wake = copy(restore)
wake.name = "wake"
wake.help = f"The same as restore.\n\n{restore.help}"
wake.epilog = examples("leasehold wake one")
