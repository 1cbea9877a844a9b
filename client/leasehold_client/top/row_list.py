"""A list of rows of which only the visible ones are rendered."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, final

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from leasehold_client.display.terminal_text import safe_cell
from leasehold_client.top.row_text import REST, Piece
from leasehold_client.top.rows import Row

_CURSOR: Final = Style(reverse=True)
_CURSOR_ELSEWHERE: Final = Style(underline=True)


@final
class RowList(ScrollView, can_focus=True):
    """Rows with a cursor, which stays on its row when rows come and go.

    Args:
        pieces: Formats a row for a width.
        empty: Text without rows.
        id: The widget's id.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "step(-1)", show=False),
        Binding("down", "step(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "first", show=False),
        Binding("end", "last", show=False),
        Binding("left", "open(False)", show=False),
        Binding("right", "open(True)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """Enter was pressed on a row."""

        def __init__(self, row: Row) -> None:
            super().__init__()
            self.row = row

    class Opened(Message):
        """An arrow opens or closes the host of a row."""

        def __init__(self, row: Row, *, is_open: bool) -> None:
            super().__init__()
            self.row = row
            self.is_open = is_open

    def __init__(self, pieces: Callable[[Row, int], Sequence[Piece]], empty: str, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.rows: Sequence[Row] = ()
        self.empty = empty
        self._pieces = pieces
        self._cursor = 0

    @property
    def selected(self) -> Row | None:
        """The row of the cursor. None: there are no rows."""
        return self.rows[self._cursor] if self.rows else None

    @property
    def visible_rows(self) -> Sequence[Row]:
        """The rows in sight."""
        first = self.scroll_offset.y
        return self.rows[first : first + self.size.height]

    def show(self, rows: Sequence[Row]) -> None:
        """Replaces the rows. The cursor stays on its row, or else at its place.

        Without the focus, a cursor on the first row stays there: nobody chose it, and new rows come first.
        """
        selected = self.selected if self.has_focus or self._cursor else None
        self.rows = rows
        if selected is not None and not self._is_at(self._cursor, selected.key):
            found = next((place for place, row in enumerate(rows) if row.key == selected.key), None)
            self._cursor = self._cursor if found is None else found
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        size = Size(self.size.width, len(rows))
        if size != self.virtual_size:
            self.virtual_size = size
            self._see_cursor()
        self.refresh()

    def select(self, key: str) -> None:
        """Moves the cursor to a row, if it is there."""
        for place, row in enumerate(self.rows):
            if row.key == key:
                self._move_to(place)
                return

    def render_line(self, y: int) -> Strip:
        """Renders one visible line."""
        place = y + self.scroll_offset.y
        width = self.size.width
        if place >= len(self.rows):
            text = f"  {self.empty}" if place == 0 else ""
            return Strip([Segment(set_cell_size(safe_cell(text), width), self.rich_style)], width)
        cursor = None
        if place == self._cursor:  # one style, since colours make a reversed row hard to read
            cursor = _CURSOR if self.has_focus else _CURSOR_ELSEWHERE
        segments = []
        left = width
        for piece in self._pieces(self.rows[place], width):
            size = left if piece.width == REST else min(left, piece.width)
            style = self.rich_style + (Style.parse(piece.style) if cursor is None else cursor)
            segments.append(Segment(set_cell_size(safe_cell(piece.text), size), style))
            left -= size
        return Strip(segments).adjust_cell_length(width, self.rich_style + (cursor or Style()))

    def action_step(self, step: int) -> None:
        """Moves the cursor by a row."""
        self._move_to(self._cursor + step)

    def action_page(self, step: int) -> None:
        """Moves the cursor by a page."""
        self._move_to(self._cursor + step * max(1, self.size.height - 1))

    def action_first(self) -> None:
        """Moves the cursor to the first row."""
        self._move_to(0)

    def action_last(self) -> None:
        """Moves the cursor to the last row."""
        self._move_to(len(self.rows) - 1)

    def action_open(self, is_open: bool) -> None:
        """Opens or closes the host of the row."""
        if self.selected is not None:
            self.post_message(self.Opened(self.selected, is_open=is_open))

    def action_choose(self) -> None:
        """Shows the details of the row, or takes it as a target."""
        if self.selected is not None:
            self.post_message(self.Chosen(self.selected))

    def on_resize(self) -> None:
        """Keeps the cursor in sight."""
        self.virtual_size = Size(self.size.width, len(self.rows))
        self._see_cursor()

    def _is_at(self, place: int, key: str) -> bool:
        return place < len(self.rows) and self.rows[place].key == key

    def _move_to(self, place: int) -> None:
        self._cursor = max(0, min(place, len(self.rows) - 1))
        self._see_cursor()
        self.refresh()

    def _see_cursor(self) -> None:
        self.scroll_to_region(Region(0, self._cursor, 1, 1), animate=False, force=True)
