"""``leasehold restore``, also called ``leasehold wake``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.gpu_names import resolve_list
from leasehold_client.cli.lookups import known_gpus
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


@click.command()
@click.argument("workload")
@click.option("--to", metavar="GPU,...", help="GPUs to restore on, in the workload's own order.")
@click.option(
    "--checkpoint",
    "checkpoint_id",
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
    workload: str,
    to: str | None,
    checkpoint_id: str,
    hold_id: str,
    preempt: str,
    dry_run: bool,
    options: CommandOptions,
) -> None:
    """Restore a suspended workload on its former GPUs, or else on free GPUs of the same chip.

    The steps of the suspend are undone in reverse order.

    `leasehold wake` and `leasehold restore` are the same.
    """
    from leasehold_client.arguments.moves import check_host
    from leasehold_client.cli.conclusion import conclude, conclude_plan

    uuids: list[str] = []
    if to is not None:
        gpus = known_gpus(client)
        uuids = resolve_list(to, gpus)
        check_host(client.workload(workload), workload, uuids, gpus)
    if dry_run and preempt:
        raise UsageError("--dry-run and --preempt exclude each other: plan each suspend and the restore")
    if dry_run:
        plan = client.plan_restore(workload, gpu_uuids=uuids, checkpoint_id=checkpoint_id, hold_id=hold_id)
        conclude_plan(client, plan, workload, click.get_current_context().info_name or "", options)
        return
    command = client.restore(
        workload,
        gpu_uuids=uuids,
        checkpoint_id=checkpoint_id,
        hold_id=hold_id,
        preempt=workload_list(preempt),
        timeout_s=options.timeout_s,
    )
    conclude(client, command, workload, options)
