"""Output of the demonstration on standard error: sentences and tables of leases."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import click
from leasehold.v1.worker_pb2 import FleetGpu

from leasehold_client.display.progress import terminal

if TYPE_CHECKING:
    from rich.console import Console

CELL_WIDTH: Final = 12


@final
class DemoScreen:
    """Prints tables with ``rich`` on a terminal, and plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = terminal()
        self._shown: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Prints a line."""
        click.echo(text, err=True)

    def show_leases(self, gpus: Sequence[FleetGpu]) -> None:
        """Prints the holder of each GPU, if a holder has changed since the last call."""
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
    """Prints one row per worker, with changes in green."""
    from rich.table import Table

    table = Table("worker", *(f"slot {slot}" for slot in range(max(map(len, workers.values())))))
    for worker, places in workers.items():
        cells = (f"[bold green]{holders[p]}[/]" if p in changed else holders[p] for p in places)
        table.add_row(worker, *cells)
    console.print(table)
