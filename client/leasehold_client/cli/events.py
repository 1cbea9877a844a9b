"""``leasehold events``: the newest events, and then each new one."""

from __future__ import annotations

import sys
import time
from collections import deque
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import click

from leasehold_client.arguments.selectors import both, quoted
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED
from leasehold_client.cli.get_watch import wait_missed
from leasehold_client.cli.lookups import ShortNames
from leasehold_client.cli.names import complete_workers, complete_workloads
from leasehold_client.cli.parameter_types import Number, Seconds, SingleOption
from leasehold_client.cli.verb import YEAR_S, output_option, verb
from leasehold_client.display.standard_output import echo, echo_lines
from leasehold_client.errors import LeaseholdError

if TYPE_CHECKING:
    from leasehold.v1.event_pb2 import Event

    from leasehold_client.coordinator.client import Client

TAIL_LIMIT: Final = 10_000
"""Most earlier events."""

_LONGEST_KIND: Final = len("WORKLOAD_CHANGED")
"""Columns of the kind. The events of a stream are not known when the first line is printed."""


@click.command(
    epilog=examples(
        "leasehold events -f",
        "leasehold events one --since 1h",
        "leasehold events --worker alpha --filter 'kind = GPU_HEALTH'",
    )
)
@click.argument("workload", required=False, shell_complete=complete_workloads)
@click.option("-f", "--follow", is_flag=True, help="Then print each new event, until interrupted.")
@click.option(
    "--worker", cls=SingleOption, default="", help="Events of this worker.", shell_complete=complete_workers
)
@click.option(
    "--since", "since_s", type=Seconds(0, YEAR_S), metavar="SECONDS", help="Events of the last 10m, 2h or 7d."
)
@click.option(
    "--tail",
    type=Number(0, TAIL_LIMIT),
    default=100,
    show_default=True,
    metavar="N",
    help="Most earlier events.",
)
@click.option(
    "--filter",
    "filter_text",
    cls=SingleOption,
    default="",
    metavar="FILTER",
    help="Which events, such as 'kind = GPU_HEALTH'.",
)
@output_option
@verb
def events(
    client: Client,
    workload: str | None,
    follow: bool,
    worker: str,
    since_s: float | None,
    tail: int,
    filter_text: str,
    output: str,
) -> None:
    """Show the newest events, the newest last.

    WORKLOAD is a name or an id. With -o json, each line is an event. `leasehold get events` has the newest
    first, as a table.
    """
    of_worker = f"worker = {quoted(worker)}" if worker else ""
    earlier = both(filter_text, of_worker)
    if since_s is not None:
        begin = datetime.fromtimestamp(time.time() - since_s, UTC).isoformat(timespec="seconds")
        earlier = both(earlier, f"time >= {begin}")
    watch = partial(client.watch_events, workload=workload or "", worker=worker, filter=filter_text)
    shown: deque[str] = deque(maxlen=TAIL_LIMIT)
    short = ShortNames(client)
    newest: datetime | None = None  # by the coordinator's clock
    try:
        while True:
            try:
                new = watch() if follow else None
                if new is not None:
                    next(new)  # a bookmark: an event after it is in the stream, and one before it in the list
                listed = client.events(workload or "", tail, filter=earlier) if tail else []
                if worker and tail and not listed:
                    client.worker(worker)  # refuses a name that no worker has
                if follow and not listed and newest is None:
                    for last in client.events(limit=1):
                        newest = last.time.ToDatetime(UTC)
                        shown.append(last.event_id)
                later = (response.event for response in new or () if response.HasField("event"))
                for event in chain(reversed(listed), later):
                    newest = event.time.ToDatetime(UTC)
                    if event.event_id in shown:
                        continue
                    shown.append(event.event_id)
                    if not _echo(short, event, output):
                        return
                return
            except LeaseholdError as error:
                wait_missed(error)  # the list has what happened meanwhile
            tail, earlier = TAIL_LIMIT, both(filter_text, of_worker)
            if newest is not None:
                earlier = both(earlier, f"time >= {newest.isoformat()}")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # no command continues, so there is nothing to say


def _echo(short: ShortNames, event: Event, output: str) -> bool:
    """Prints an event. Returns False if nobody reads any more."""
    if output == "json":
        import json

        from leasehold_client.display.documents import to_dict

        return echo(json.dumps(to_dict(event)))
    if output == "yaml":
        from leasehold_client.display.documents import document_text, to_dict

        return echo_lines(f"---\n{document_text(to_dict(event), output)}")
    from leasehold.v1.event_pb2 import EventKind

    from leasehold_client.display.record_tables import event_text
    from leasehold_client.display.terminal_text import one_line, safe_cell
    from leasehold_client.messages import enum_name, time_text

    kind = enum_name(EventKind.Name, event.kind, "EVENT_KIND_").ljust(_LONGEST_KIND)
    text = short.replaced(event_text(event))
    return echo(f"{time_text(event.time)}  {kind}  {safe_cell(one_line(text))}")
