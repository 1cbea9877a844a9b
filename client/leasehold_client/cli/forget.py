"""``leasehold forget``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.verb import output_option, verb
from leasehold_client.display.standard_output import echo

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.group()
def forget() -> None:
    """Make the coordinator forget a worker that will not come back."""


@forget.command()
@click.argument("name", metavar="NAME|ID")
@output_option
@verb
def worker(client: Client, name: str, output: str) -> None:
    """Forget a worker that is not connected.

    The worker's open workloads and commands become FAILED. Nothing on its host changes. If the worker
    connects again, it is registered again, with the workloads that it still has.
    """
    forgotten = client.forget_worker(name)
    if output == "json":
        from leasehold_client.display.documents import echo_message

        echo_message(forgotten)
        return
    failed = len(forgotten.failed_workload_ids)
    workloads = f"; {failed} workload{'' if failed == 1 else 's'} of it FAILED" if failed else ""
    echo(f"{forgotten.worker.name} ({forgotten.worker.worker_id}): forgotten{workloads}")
