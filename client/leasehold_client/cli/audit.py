"""``leasehold audit``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import EXIT_FAILED
from leasehold_client.cli.verb import output_option, verb
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import echo_error, one_line

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.group()
def audit() -> None:
    """Verify that nobody changed the audit. `leasehold get audit` lists its entries."""


@audit.command(epilog=examples("leasehold audit verify"))
@output_option
@verb
def verify(client: Client, output: str) -> None:
    """Recompute the hashes of all entries, and print the number and the hash of the last one.

    Keep both elsewhere: a later list shows whether the entry still has this hash. The exit code is 1 if the
    chain of hashes is broken.
    """
    from leasehold_client.display.documents import echo_message

    found = client.verify_audit()
    if output != "table":
        echo_message(found, output)
    else:
        last = f"entry {found.last_number} has hash {found.last_hash.hex()}"
        echo(f"verified {found.entry_count} entries; {last}")
    if found.HasField("broken"):
        problem = (
            f"leasehold: the audit is broken at entry {found.broken.number}: {found.broken.problem}; compare "
            "the store with a backup"
        )
        echo_error(one_line(problem))
        sys.exit(EXIT_FAILED)
