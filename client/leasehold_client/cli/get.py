"""``leasehold get``: lists, and single messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from leasehold_client.arguments.gpu_names import resolve_list
from leasehold_client.cli.get_watch import echo_changes
from leasehold_client.cli.lookups import known_checkpoints, known_gpus, worker_names
from leasehold_client.cli.verb import output_option, verb

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from leasehold_client.coordinator.client import Client

Shown = TypeVar("Shown", bound="Message")


@click.command()
@click.argument(
    "kind",
    type=click.Choice(["workers", "gpus", "workloads", "checkpoints", "commands", "events", "audit"]),
)
@click.argument("name", required=False)
@click.option("-a", "--all", "include_ended", is_flag=True, help="Include workloads that have ended.")
@click.option("-w", "--watch", is_flag=True, help="Then print a line per change, until interrupted.")
@click.option(
    "--filter",
    "filter_text",
    default="",
    metavar="FILTER",
    help="Which to list, such as 'state = RUNNING AND labels.team = vision'.",
)
@click.option(
    "--sort-by", default="", metavar="FIELDS", help="How to sort the list, such as 'state, name desc'."
)
@output_option
@verb
def get(
    client: Client,
    kind: str,
    name: str | None,
    include_ended: bool,
    filter_text: str,
    sort_by: str,
    watch: bool,
    output: str,
) -> None:
    """List workers, GPUs, workloads, checkpoints, commands, events or the audit, or show one by NAME.

    For checkpoints and events, NAME is the name or id of a workload. For the audit, NAME is an identity, such
    as user/alice.
    """
    from leasehold_client.display import fleet_tables, tables

    if name and kind not in ("checkpoints", "events", "audit") and (filter_text or sort_by):
        raise click.UsageError(f"--filter and --sort-by are for lists: leave out {name!r} or the options")
    if sort_by and kind == "checkpoints":
        raise click.UsageError("checkpoints are always listed newest first: leave out --sort-by")
    if watch:
        if sort_by:
            raise click.UsageError("--watch shows changes in their order: leave out --sort-by")
        echo_changes(client, kind, name, filter_text, output)
        return
    match kind:
        case "workers":
            workers = [client.worker(name)] if name else client.workers(filter=filter_text, order_by=sort_by)
            _show(kind, name, workers, output, fleet_tables.echo_workers)
        case "gpus":
            gpus = known_gpus(client, filter_text, sort_by)
            uuids = resolve_list(name, gpus) if name else [gpu.gpu.uuid for gpu in gpus]
            _show(kind, name, [gpu for gpu in gpus if gpu.gpu.uuid in uuids], output, fleet_tables.echo_gpus)
        case "workloads":
            workloads = (
                [client.workload(name)]
                if name
                else client.workloads(include_ended=include_ended, filter=filter_text, order_by=sort_by)
            )
            places = partial(fleet_tables.echo_workloads, gpus=client.gpus())
            _show(kind, name, workloads, output, places)
        case "checkpoints":
            checkpoints = known_checkpoints(client, name or "", filter_text)
            _show(
                kind,
                None,
                checkpoints,
                output,
                lambda found: tables.echo_checkpoints(found, worker_names(client)),
            )
        case "events":
            events = client.events(name or "", filter=filter_text, order_by=sort_by)
            _show(kind, None, events, output, tables.echo_events)
        case "audit":
            entries = client.audit_entries(filter=_of_identity(name, filter_text), order_by=sort_by)
            _show(kind, None, entries, output, tables.echo_audit)
        case _:
            commands = (
                [client.command(name)] if name else client.commands(filter=filter_text, order_by=sort_by)
            )
            _show(kind, name, commands, output, tables.echo_commands)


def _of_identity(identity: str | None, filter_text: str) -> str:
    """A filter of the audit, narrowed to an identity."""
    if not identity:
        return filter_text
    quoted = identity.replace("\\", "\\\\").replace('"', '\\"')
    narrowed = f'identity = "{quoted}"'
    return f"({filter_text}) AND {narrowed}" if filter_text.strip() else narrowed


def _show(
    kind: str,
    name: str | None,
    messages: Sequence[Shown],
    output: str,
    echo: Callable[[Sequence[Shown]], None],
) -> None:
    """Prints messages as a table or as JSON. A single message that was named is its own document."""
    from leasehold_client.display.documents import echo_json, echo_message, to_dict

    if output != "json":
        echo(messages)
    elif name and len(messages) == 1:
        echo_message(messages[0])
    else:
        echo_json({kind: [to_dict(message) for message in messages]})
