"""``leasehold whoami``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.verb import output_option, verb
from leasehold_client.display.standard_output import echo

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.command(epilog=examples("leasehold whoami", "leasehold whoami --as user/alice"))
@output_option
@verb
def whoami(client: Client, output: str) -> None:
    """Show the identity and the role that the coordinator sees."""
    from leasehold.v1.access_service_pb2 import Role

    from leasehold_client.display.documents import echo_message

    found = client.who_am_i()
    if output != "table":
        echo_message(found, output)
        return
    role = Role.Name(found.role).removeprefix("ROLE_").lower() if found.role else "no role"
    user = f" on behalf of {found.on_behalf_of}" if found.on_behalf_of else ""
    echo(f"{found.identity}{user}: {role}")
