"""``leasehold wait``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.parameter_types import Seconds
from leasehold_client.cli.verb import READY_LIMIT_S, YEAR_S, output_option, verb
from leasehold_client.display.standard_output import echo

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client
    from leasehold_client.coordinator.workload_watch import Condition


@click.command()
@click.argument("workload")
@click.option(
    "--for",
    "condition",
    type=click.Choice(["ready", "ended"]),
    default="ready",
    show_default=True,
    help="Condition to wait for.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0, YEAR_S),
    default=READY_LIMIT_S,
    metavar="SECONDS",
    help=f"Longest wait; then exit with 4.  [default: {READY_LIMIT_S:g}]",
)
@output_option
@verb
def wait(client: Client, workload: str, condition: Condition, timeout_s: float, output: str) -> None:
    """Wait until a workload is ready or has ended.

    A workload is ready once its readiness probes have succeeded. A workload without probes is ready once it
    uses CUDA, or at once if it has no GPU. If the workload ends before it is ready, the exit code is 1.
    """
    from leasehold_client.display.documents import echo_message
    from leasehold_client.messages import workload_state

    found = client.wait_workload(workload, condition, timeout_s=timeout_s)
    if output != "table":
        echo_message(found, output)
    else:
        echo(f"{workload}: {'ready' if condition == 'ready' else workload_state(found)}")
