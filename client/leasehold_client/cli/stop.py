"""``leasehold stop``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click

from leasehold_client.cli.verb import (
    WEEK_S,
    Seconds,
    output_option,
    timeout_option,
    verb,
    waiting_options,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from leasehold_client.coordinator.client import Client
    from leasehold_client.coordinator.command_watch import Waiting

Shown = TypeVar("Shown", bound="Message")


@click.command()
@click.argument("workload")
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(min=0, max=WEEK_S),
    metavar="SECONDS",
    help="Grace period between SIGTERM and SIGKILL.  [default: 10]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Kill restored processes even if they can't be suspended first, which can hang their host.",
)
@waiting_options()
@timeout_option
@output_option
@verb
def stop(
    client: Client,
    workload: str,
    grace_s: float | None,
    force: bool,
    waiting: Waiting,
    timeout_s: float | None,
    output: str,
) -> None:
    """Stop a workload. A suspended workload is killed at once, since it can't handle SIGTERM."""
    from leasehold_client.cli.conclusion import conclude

    command = client.stop(workload, grace_s=grace_s, force=force, timeout_s=timeout_s)
    conclude(client, command, workload, waiting=waiting, output=output)
