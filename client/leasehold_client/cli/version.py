"""``leasehold version``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client import __version__
from leasehold_client.cli.examples import examples
from leasehold_client.cli.verb import as_option, context_option, coordinator_option, output_option, verb
from leasehold_client.display.standard_output import echo

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command(
    epilog=examples("leasehold version", "leasehold version --client", "leasehold version -o json")
)
@click.option("--client", "client_only", is_flag=True, help="Of this program only, without a coordinator.")
@output_option
@coordinator_option
@context_option
@as_option
def version(
    client_only: bool, output: str, coordinator: str | None, context: str | None, on_behalf_of: str
) -> None:
    """Show the versions of this program and of the coordinator.

    If no coordinator answers, only the first one is shown, as a table, and the exit code is 3. A document
    then needs --client. `leasehold get workers -o wide` shows the versions of the workers.
    """
    if output == "table":
        echo(f"client       {__version__}")
    if not client_only:
        _of_coordinator(coordinator, context, on_behalf_of, output)
    elif output != "table":
        from leasehold_client.display.documents import echo_document

        echo_document({"client": {"version": __version__}}, output)


@verb
def _of_coordinator(client: Client, output: str) -> None:
    from leasehold_client.display.documents import echo_document

    found = client.who_am_i().coordinator_version or "unknown, older than 0.1.0"
    if output == "table":
        echo(f"coordinator  {found} at {client.address}")
        return
    sides = {"client": {"version": __version__}, "coordinator": {"version": found, "address": client.address}}
    echo_document(sides, output)
