"""``leasehold web``: the options of the web page as a client of the coordinator."""

from __future__ import annotations

import click

from leasehold_client import interrupts
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import fail, interrupted
from leasehold_client.cli.parameter_types import refuse_empty
from leasehold_client.cli.verb import as_option, context_option, coordinator_option
from leasehold_client.contexts import chosen_coordinator
from leasehold_client.errors import LeaseholdError


@click.command(epilog=examples("leasehold web", "leasehold web --listen 127.0.0.1:0 --context alice"))
@click.option(
    "--listen",
    default="127.0.0.1:7480",
    metavar="HOST:PORT",
    show_default=True,
    help="Loopback address for browsers; port 0 takes a free one.",
)
@coordinator_option
@context_option
@as_option
def web(listen: str, coordinator: str | None, context: str | None, on_behalf_of: str) -> None:
    """Serve the web page on this host, as a client of the coordinator.

    The page acts with the identity of the context, as other verbs do. Whoever has the printed address may use
    it, so other users of this host need it too. It listens on loopback only.
    """
    from leasehold_client.cli.web_page import serve  # late: imports gRPC, protobuf and aiohttp

    interrupts.raise_in_verb()
    refuse_empty(click.get_current_context())
    try:
        address, found = chosen_coordinator(coordinator, context)
        serve(listen, address, found, on_behalf_of)
    except LeaseholdError as error:
        fail(error)
    except KeyboardInterrupt:
        interrupted("the page has ended, and commands continue")
