"""Tables for people: aligned columns that fit the terminal. No cell is wrapped."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

from google.protobuf.message import Message

from leasehold_client.arguments.suggestions import close_to
from leasehold_client.byte_sizes import size_text
from leasehold_client.display import terminal
from leasehold_client.display.standard_output import echo_escaped
from leasehold_client.display.terminal_text import safe_cell
from leasehold_client.errors import UsageError

Row = TypeVar("Row")

GAP: Final = "  "
SHRUNK_WIDTH: Final = 16
"""Columns that a shortened cell keeps before a less important column is dropped instead."""


@final
@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        heading: The heading. In lower case, with ``-`` for blanks, the name for ``--columns``.
        cell: The text of a row.
        drop: Order in which columns are dropped at narrow terminals: the highest number first. 0: never.
        is_wide: Whether the column is shown with ``-o wide`` or by name only.
        shrinks: Whether a narrow terminal may shorten the cells.
        is_state: Whether the cell is a state, which has a colour.
    """

    heading: str
    cell: Callable[[Row], str]
    drop: int = 0
    is_wide: bool = False
    shrinks: bool = False
    is_state: bool = False

    @property
    def name(self) -> str:
        """The name for ``--columns``."""
        return self.heading.lower().replace(" ", "-")


@final
@dataclass(frozen=True, slots=True)
class View:
    """What a table shows.

    Attributes:
        is_wide: Whether all columns are shown, whatever the width of the terminal.
        names: Names of the columns, in order. Empty: those of the table.
    """

    is_wide: bool = False
    names: tuple[str, ...] = ()


DEFAULT_VIEW: Final = View()


def echo_table(columns: Sequence[Column[Row]], rows: Iterable[Row], view: View = DEFAULT_VIEW) -> None:
    """Prints rows as a table. A terminal gets a table of its width, and colours for states.

    Raises:
        UsageError: The view names an unknown column.
    """
    chosen = choose(columns, view)
    cells = [[column.heading for column in chosen]]
    cells += [[safe_cell(column.cell(row)) for column in chosen] for row in rows]
    widths = [max(map(terminal.text_width, column)) for column in zip(*cells, strict=True)]
    limit = None if view.is_wide else terminal.columns()
    if limit is not None:
        widths = fit(chosen, widths, limit, may_drop=not view.names)
    has_colour = terminal.has_colour()
    for number, line in enumerate(cells):
        is_coloured = has_colour and number > 0
        shown = [
            (column, terminal.shortened(cell, width), width)
            for column, cell, width in zip(chosen, line, widths, strict=True)
            if width
        ]
        echo_escaped(
            GAP.join(
                _padded(cell, width, cell if is_coloured and column.is_state else "")
                for column, cell, width in shown
            ).rstrip()
        )


def choose(columns: Sequence[Column[Row]], view: View) -> list[Column[Row]]:
    """The columns of a view, in order.

    Raises:
        UsageError: The view names an unknown column.
    """
    if not view.names:
        return [column for column in columns if view.is_wide or not column.is_wide]
    by_name = {column.name: column for column in columns}
    for name in view.names:
        if name not in by_name:
            raise UsageError(
                f"no column is named {name!r}{close_to(name, by_name)}: choose {', '.join(by_name)}"
            )
    return [by_name[name] for name in view.names]


def fit(
    columns: Sequence[Column[Row]], widths: Sequence[int], limit: int, *, may_drop: bool = True
) -> list[int]:
    """Widths of columns on a terminal. 0: the column is dropped.

    Cells are shortened first, down to SHRUNK_WIDTH. Then columns are dropped by their order. The remaining
    table may still be wider than the terminal.
    """
    fitted = list(widths)
    by_drop = sorted(
        (number for number, column in enumerate(columns) if column.drop and may_drop),
        key=lambda number: -columns[number].drop,
    )
    for dropped in [None, *by_drop]:
        if dropped is not None:
            fitted[dropped] = 0
        over = _total(fitted) - limit
        if over <= 0:
            return fitted
        spare = {
            number: fitted[number] - SHRUNK_WIDTH
            for number, column in enumerate(columns)
            if column.shrinks and fitted[number] > SHRUNK_WIDTH
        }
        if sum(spare.values()) < over:
            continue
        for number in sorted(spare, key=lambda number: -spare[number]):
            taken = min(spare[number], over)
            fitted[number] -= taken
            over -= taken
        return fitted
    return fitted


def _total(widths: Iterable[int]) -> int:
    shown = [width for width in widths if width]
    return sum(shown) + len(GAP) * (len(shown) - 1)


def _padded(cell: str, width: int, state: str) -> str:
    blanks = " " * (width - terminal.text_width(cell))
    return (terminal.coloured(cell, state) if state else cell) + blanks


def table_lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligns rows of equal length."""
    cells = [[safe_cell(cell) for cell in row] for row in rows]
    widths = [max(map(terminal.text_width, column)) for column in zip(*cells, strict=True)]
    return [
        GAP.join(_padded(cell, width, "") for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def field_size(message: Message, field: str) -> str:
    """Formats an optional field in bytes. "?": unset."""
    return size_text(getattr(message, field)) if message.HasField(field) else "?"


def field_text(message: Message, field: str, unit: str = "", unknown: str = "?") -> str:
    """Formats an optional field with its unit, or as ``unknown`` if the field is unset."""
    if not message.HasField(field):
        return unknown
    value = getattr(message, field)
    return f"{value}{unit}" if not isinstance(value, bool) else ("yes" if value else "no")
