"""``leasehold stop``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.names import complete_workloads
from leasehold_client.cli.parameter_types import Seconds
from leasehold_client.cli.selection import Selection, confirm, selection_options, yes_option
from leasehold_client.cli.verb import WEEK_S, CommandOptions, command_options, verb

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import Workload

    from leasehold_client.coordinator.client import Client


@click.command(
    epilog=examples(
        "leasehold stop one", "leasehold stop one two --grace 1m", "leasehold stop -l team=vision --yes"
    )
)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...", shell_complete=complete_workloads)
@selection_options
@yes_option
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(0, WEEK_S),
    metavar="SECONDS",
    help="Grace period between SIGTERM and SIGKILL.  [default: 10]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Kill restored processes even if they can't be suspended first, which can hang their host.",
)
@command_options
@verb
def stop(
    client: Client,
    selection: Selection,
    yes: bool,
    grace_s: float | None,
    force: bool,
    options: CommandOptions,
) -> None:
    """Stop workloads. A suspended workload is killed at once, since it can't handle SIGTERM.

    A state that is parked in memory or in an image is lost. Application checkpoints stay until they expire:
    `leasehold run --from-checkpoint ID` starts from one.
    """
    from leasehold_client.cli.conclusion import conclude, conclude_all

    def applies(workload: Workload) -> bool:
        return True  # the list has no workload that has ended

    chosen = selection.find(client, applies)
    ask = partial(client.stop, grace_s=grace_s, force=force, timeout_s=options.timeout_s)
    if not selection.is_search and len(chosen) == 1:
        [(label, name)] = chosen
        conclude(client, ask(name), label, options)
    else:
        if chosen and selection.is_search:
            confirm("stop", [label for label, _ in chosen], yes=yes)
        each = [(label, partial(ask, name)) for label, name in chosen]
        conclude_all(client, each, options, is_search=selection.is_search)
