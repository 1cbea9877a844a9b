"""What the demonstration shows: sentences, and the leases as they change. All on standard error."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import click
from leasehold.v1.fleet_pb2 import FleetGpu

from leasehold_client.display.progress import terminal

if TYPE_CHECKING:
    from rich.console import Console

CELL_WIDTH: Final = 12


@final
class DemoScreen:
    """A table by rich on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = terminal()
        self._shown: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Shows a line."""
        click.echo(text, err=True)

    def show_leases(self, gpus: Sequence[FleetGpu]) -> None:
        """Shows who holds which GPU, if that has changed since it was last shown."""
        holders = {f"{gpu.worker_name}/{gpu.gpu.slot}": gpu.workload_name or "-" for gpu in gpus}
        if holders == self._shown:
            return
        changed = {place for place, holder in holders.items() if self._shown.get(place) != holder}
        self._shown = holders
        workers: dict[str, list[str]] = {}
        for place in holders:
            workers.setdefault(place.rpartition("/")[0], []).append(place)
        if self._console is None:
            for places in workers.values():
                cells = (f"{place:<8}{holders[place]:<{CELL_WIDTH}}" for place in places)
                self.say(f"  {'  '.join(cells)}".rstrip())
        else:
            _print_table(self._console, workers, holders, changed)


def _print_table(
    console: "Console", workers: dict[str, list[str]], holders: dict[str, str], changed: set[str]
) -> None:
    """One row for each worker, with what has changed standing out."""
    from rich.table import Table

    table = Table("worker", *(f"slot {slot}" for slot in range(max(map(len, workers.values())))))
    for worker, places in workers.items():
        cells = (f"[bold green]{holders[p]}[/]" if p in changed else holders[p] for p in places)
        table.add_row(worker, *cells)
    console.print(table)
