"""``leasehold get``: lists, and single objects."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from leasehold_client.arguments.kinds import LABELLED, Kind
from leasehold_client.arguments.selectors import both, label_filter
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED, raise_all
from leasehold_client.cli.get_watch import echo_changes
from leasehold_client.cli.kind_argument import KindType
from leasehold_client.cli.names import complete_kind
from leasehold_client.cli.parameter_types import SingleOption
from leasehold_client.cli.verb import verb
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold_client.cli.listing import Listing
    from leasehold_client.coordinator.client import Client

_OF_OTHERS = ("checkpoints", "events", "audit")
"""Kinds whose NAME is that of another object, so that a name and a filter go together."""


@click.command(
    epilog=examples(
        "leasehold get workloads",
        "leasehold get gpus -o wide",
        "leasehold get workload one two -o yaml",
        "leasehold get workers -l rack=r1 --columns name,state,free",
        "leasehold get workloads --all --filter 'state = FAILED' --sort-by 'name desc'",
        "leasehold get workloads --watch",
    )
)
@click.argument("kind", type=KindType())
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_kind)
@click.option("-a", "--all", "include_ended", is_flag=True, help="Include workloads that have ended.")
@click.option("-w", "--watch", is_flag=True, help="Then print a line per change, until interrupted.")
@click.option(
    "-l",
    "--selector",
    cls=SingleOption,
    default="",
    metavar="LABELS",
    help="Labels, such as team=vision,tier!=dev.",
)
@click.option(
    "--filter",
    "filter_text",
    cls=SingleOption,
    default="",
    metavar="FILTER",
    help="Which to list, such as 'state = RUNNING AND labels.team = vision'.",
)
@click.option(
    "--sort-by",
    default="",
    metavar="FIELDS",
    help="How to sort the list, such as 'state, name desc'.",
)
@click.option(
    "--columns",
    default="",
    metavar="COLUMN,...",
    help="Columns of the table, in order.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print ids only, one per line.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "yaml", "name"]),
    default="table",
    show_default=True,
    help="Output format. wide: all columns; json and yaml: the field names of the protos; name: names only, "
    "one per line.",
)
@verb
def get(
    client: Client,
    kind: Kind,
    names: Sequence[str],
    include_ended: bool,
    watch: bool,
    selector: str,
    filter_text: str,
    sort_by: str,
    columns: str,
    quiet: bool,
    output: str,
) -> None:
    """List workers, GPUs, workloads, checkpoints, commands, events or the audit, or show some by NAME.

    KIND is a plural, a singular or a short name: wk, wl, ckpt, cmd, ev. For checkpoints and events, NAME is
    the name or id of a workload. For the audit, NAME is an identity, such as user/alice.
    """
    from leasehold_client.cli.listing import Query, list_kind

    plural = kind.plural
    if selector and plural not in LABELLED:
        raise UsageError(f"{kind.objects} have no labels: leave out -l, or use --filter")
    filter_text = both(filter_text, label_filter(selector))
    if names and plural not in _OF_OTHERS and (filter_text or sort_by):
        raise UsageError(f"-l, --filter and --sort-by are for lists: leave out {names[0]!r} or the options")
    if sort_by and plural == "checkpoints":
        raise UsageError("checkpoints are always listed newest first: leave out --sort-by")
    if columns and (quiet or output not in ("table", "wide")):
        raise UsageError("--columns is for tables: leave out -q and -o, or --columns")
    if quiet and output != "table":
        raise UsageError("-q prints ids only: leave out -o, or -q")
    if watch:
        if sort_by:
            raise UsageError("--watch shows changes in their order: leave out --sort-by")
        if include_ended:
            raise UsageError("--watch begins with open workloads, and shows their end: leave out --all")
        if columns or quiet or output in ("wide", "name"):
            raise UsageError("--watch prints a line per change: leave out -q, --columns, -o wide and -o name")
        if len(names) > 1:
            raise UsageError("--watch shows all or one: name one, or use --filter")
        try:
            echo_changes(client, plural, names[0] if names else None, filter_text, output)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)  # no command continues, so there is nothing to say
        return
    listing = list_kind(client, plural, Query(names, filter_text, sort_by, include_ended))
    is_one = len(names) == 1 and plural not in _OF_OTHERS
    if quiet:
        for message in listing.messages:
            echo(listing.identifier(message))
    elif output == "name":
        for message in listing.messages:
            echo(listing.name(message))
    elif output in ("json", "yaml"):
        _echo_documents(plural, listing, output, is_one=is_one)
    else:
        _echo_table(plural, listing, output, columns, is_list=not names)
    raise_all(listing.refusals)


def _echo_documents(plural: str, listing: Listing, output: str, *, is_one: bool) -> None:
    """Prints a list, or a single object that was named, as a document."""
    from leasehold_client.display.documents import echo_document, to_dict

    documents = [to_dict(message) for message in listing.messages]
    echo_document(documents[0] if is_one and len(documents) == 1 else {plural: documents}, output)


def _echo_table(plural: str, listing: Listing, output: str, columns: str, *, is_list: bool) -> None:
    """Prints a table. An empty list has its headings, and a note on a terminal says that there is nothing."""
    from leasehold_client.display.tables import View, echo_table
    from leasehold_client.display.terminal import columns as terminal_columns

    chosen = tuple(name.strip().lower() for name in columns.split(",")) if columns else ()
    echo_table(listing.columns, listing.messages, View(output == "wide", chosen))
    if is_list and not listing.messages and terminal_columns() is not None:
        hint = " that have not ended; --all lists those that have" if plural == "workloads" else ""
        echo_error(f"leasehold: no {plural}{hint}")
