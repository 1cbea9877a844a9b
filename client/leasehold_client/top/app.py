"""The screen of ``leasehold top``: its lists, lines and keys."""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Final, final

from rich.console import RenderableType
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.events import Resize
from textual.widgets import Input, Static
from textual.worker import Worker as TextualWorker
from textual.worker import WorkerFailed

from leasehold_client.aio.client import AsyncClient
from leasehold_client.display.terminal_text import one_line, safe_cell
from leasehold_client.top.contact import Contact
from leasehold_client.top.details import detail_lines, row_title
from leasehold_client.top.dialogs import TextDialog
from leasehold_client.top.filter_feed import FilterFeed
from leasehold_client.top.fleet_feed import FleetFeed
from leasehold_client.top.fleet_model import FleetModel
from leasehold_client.top.key_help import HELP, keys_line
from leasehold_client.top.operations import Operations
from leasehold_client.top.plain_filter import FILTER_LIMIT, is_expression
from leasehold_client.top.row_list import RowList
from leasehold_client.top.row_text import Piece, row_pieces
from leasehold_client.top.rows import (
    OPEN_HOSTS_LIMIT,
    ORDERS,
    Row,
    SlotRow,
    View,
    command_rows,
    fleet_rows,
)
from leasehold_client.top.selection import host_of
from leasehold_client.top.summary_text import connection_text, counts_text
from leasehold_client.top.terminal_driver import TerminalDriver

TICK_S: Final = 0.1
"""Shortest time between two updates of the rows."""

AGES_S: Final = 1.0
"""Time between two updates of ages."""

LOW_SCREEN: Final = 20
"""Height below which a note or a problem has two lines, so that it leaves lines to the fleet."""


@final
class TopApp(App[None]):
    """The fleet, live, with keys for operations.

    Args:
        client: The client. Its ``on_wait`` calls :meth:`Contact.failed`.
        contact: The state of the connection.
        caller: The calling user, for cordons.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "suspend"),
        Binding("r", "restore"),
        Binding("m", "move"),
        Binding("x", "stop"),
        Binding("c", "cordon"),
        Binding("k", "cancel_command"),
        Binding("slash", "filter", priority=True),  # takes the focus before the next key is read
        Binding("o", "sort"),
        Binding("p", "pause"),
        Binding("question_mark", "help"),
        Binding("escape", "leave"),
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
    ]

    def __init__(self, client: AsyncClient, contact: Contact, caller: str) -> None:
        super().__init__(driver_class=TerminalDriver, ansi_color=True)
        self.theme = "ansi-dark"
        self.failure: BaseException | None = None
        """The defect that ended the page. None: it has none so far."""
        self.model = FleetModel()
        self.contact = contact
        self._client = client
        self._operations = Operations(self, client, self.model, contact, caller)
        self._feed = FleetFeed(client, self.model, contact, self._visible_workers)
        self._fleet = RowList(self._pieces, "no host matches", id="fleet")
        self._commands = RowList(self._pieces, "no open command", id="commands")
        self._view = View()
        self._filter: FilterFeed | None = None
        self._filter_worker: TextualWorker[None] | None = None
        self._filter_text = ""
        self._shown: tuple[object, ...] = ()
        self._paused_at_s: float | None = None
        self._written: dict[str, tuple[str, str]] = {}

    def compose(self) -> ComposeResult:
        """The parts of the screen. No text is markup."""
        yield Static("", id="connection", markup=False)
        yield Static("", id="counts", markup=False)
        yield self._fleet
        yield Static("Commands", id="commands-title", markup=False)
        yield self._commands
        yield Input(
            placeholder="words, or an expression such as gpu_name:H100 AND state = FREE",
            id="filter",
            max_length=FILTER_LIMIT,
        )
        yield Static("", id="note", markup=False)
        yield Static(keys_line(self.size.width), id="keys")

    def on_mount(self) -> None:
        """Starts the watches and the updates."""
        self._fleet.focus()
        self.run_worker(self._feed.run(), exit_on_error=True)
        self.set_interval(TICK_S, self._update_rows)
        self.set_interval(AGES_S, self._update_ages)
        self._update_texts()

    def on_resize(self, event: Resize) -> None:
        """Fits the line of keys to the terminal."""
        for line in self.query("#keys").results(Static):
            line.update(keys_line(event.size.width))

    def _handle_exception(self, error: Exception) -> None:
        """Ends the page after a defect. textual would print a traceback with the values of variables."""
        if self.failure is None:
            self.failure = error.error if isinstance(error, WorkerFailed) else error
        super()._handle_exception(error)
        self._exit_renderables.clear()

    def panic(self, *renderables: RenderableType) -> None:
        """Ends the page after a defect in a thread of textual, which hands over its traceback."""
        super().panic(*renderables)
        self._exit_renderables.clear()
        if self.failure is None:
            self.failure = RuntimeError("a thread of the terminal failed")

    # Updates

    def _update_rows(self) -> None:
        """Shows new rows, if anything has changed since the last ones."""
        feed = self._filter
        refusal = self.contact.refusal
        is_moving = self._operations.is_moving
        revisions = (self.model.revision, feed and feed.revision)
        state = (*revisions, self._view, self._paused_at_s, refusal, is_moving)
        self._update_texts()
        if state == self._shown or self._paused_at_s is not None:
            return
        self._shown = state
        if not self._fleet.rows and self.model.is_complete:
            opens = len(self.model.workers.values) <= OPEN_HOSTS_LIMIT
            self._view = replace(self._view, opens_hosts=opens)
        matches = feed.matches if feed is not None and not feed.refusal else None
        self._fleet.empty = self._empty_text()
        view = replace(self._view, matches=matches)
        if is_moving:  # any slot may be the target
            view = replace(view, words=(), matches=None)
        self._fleet.show(fleet_rows(self.model, view))
        self._commands.show(command_rows(self.model))
        self._operations.tell_outcomes()

    def _empty_text(self) -> str:
        if self._filter is not None and not self._filter.is_answered:
            return "the coordinator has not answered the filter yet"
        if self._filter_text:
            return "nothing matches the filter: press / to change or empty it"
        if self.contact.refusal:
            return "the fleet is not shown: the first line says why"
        if not self.model.is_complete:
            return "reading the fleet …"
        return "no worker is registered: start one with `leasehold worker`"

    def _update_ages(self) -> None:
        self._fleet.refresh()
        self._commands.refresh()

    def _update_texts(self) -> None:
        """The lines around the lists."""
        state, style = connection_text(self.contact, self.model, is_paused=self._paused_at_s is not None)
        who = f"{self.contact.caller.identity} ({self.contact.role or 'no role'})"
        short = "short" if self.size.height < LOW_SCREEN else ""
        self._write("connection", f"{state} | {self._client.address} | {who}", f"{style} {short}")
        self._write("note", self._note_text(), short)
        if self._paused_at_s is None:
            is_unknown = bool(self.contact.refusal) and not self.model.workers.values
            self._write("counts", "" if is_unknown else counts_text(self.model))
            count = len(self.model.commands.values)
            self._write(
                "commands-title",
                "Commands" if is_unknown else f"Commands: {count} open, and the newest ended ones",
            )
            self._commands.empty = "not shown" if is_unknown else "no open command"

    def _write(self, place: str, text: str, style: str = "") -> None:
        """Writes a line of text, if it has changed."""
        if self._written.get(place) != (text, style):
            try:
                line = self.query_one(f"#{place}", Static)
            except NoMatches:  # textual removes the lines of a page that ends before its timers
                return
            self._written[place] = (text, style)
            line.set_classes(style)
            line.update(safe_cell(text))

    def _note_text(self) -> str:
        """The pending action of the user, or the last message, the refusal of the filter, or the order."""
        if text := self._operations.text:
            return text
        if self._filter is not None and self._filter.refusal:
            return one_line(self._filter.refusal)
        shown = f"filter: {self._filter_text}   " if self._filter_text else ""
        return f"{shown}order: {self._view.order}"

    def _pieces(self, row: Row, width: int) -> Sequence[Piece]:
        now_s = time.time() if self._paused_at_s is None else self._paused_at_s
        return row_pieces(row, now_s, width)

    def _visible_workers(self) -> Collection[str]:
        """The hosts whose GPUs are in sight."""
        slots = (row.gpu.worker_id for row in self._fleet.visible_rows if isinstance(row, SlotRow))
        return dict.fromkeys(slots)

    # The list

    def on_row_list_opened(self, event: RowList.Opened) -> None:
        """Opens or closes a host."""
        worker_id = host_of(event.row)
        if worker_id is None:
            return
        is_toggled = event.is_open != self._view.opens_hosts
        others = self._view.toggled - {worker_id}
        self._look(replace(self._view, toggled=others | {worker_id} if is_toggled else others))
        if not event.is_open:
            self._fleet.select(f"host {worker_id}")

    def on_row_list_chosen(self, event: RowList.Chosen) -> None:
        """Shows the details of a row, or takes its slot as the target of a move."""
        if self._operations.is_moving:
            self._operations.end_move(event.row)
            return
        places = self.model.places()
        last = event.row

        def lines() -> list[str]:
            nonlocal last
            rows = [*self._fleet.rows, *self._commands.rows]
            current = next((row for row in rows if row.key == last.key), None)
            last = current or last
            gone = [] if current else ["The row has left the list. Its last state there:", ""]
            return [*gone, *detail_lines(last, places, time.time())]

        self.push_screen(TextDialog(row_title(event.row), lines))

    def action_sort(self) -> None:
        """Takes the next order of hosts."""
        names = list(ORDERS)
        self._operations.message = ""
        self._look(replace(self._view, order=names[(names.index(self._view.order) + 1) % len(names)]))

    def _look(self, view: View) -> None:
        """Shows another view of the present fleet, which ends a pause."""
        self._paused_at_s = None
        self._view = view
        self._update_rows()

    def action_pause(self) -> None:
        """Stops the list, or lets it go on. The model stays current."""
        self._paused_at_s = time.time() if self._paused_at_s is None else None

    def action_help(self) -> None:
        """Shows the keys."""
        self.push_screen(TextDialog("leasehold top", lambda: HELP))

    def action_leave(self) -> None:
        """Leaves a move, the input of a filter, the last message, or a filter that was refused."""
        is_open = self.query_one("#filter", Input).display
        if self._filter is not None and self._filter.refusal and not self._operations.text and not is_open:
            self._filter_by("")
        self._operations.leave()
        self._close_filter()

    # The filter

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """In an input or a dialog, the key of the filter is a character."""
        return action != "filter" or (isinstance(self.focused, RowList) and len(self.screen_stack) == 1)

    def action_filter(self) -> None:
        """Opens the input of the filter."""
        entry = self.query_one("#filter", Input)
        entry.value = self._filter_text
        entry.display = True
        self.screen.set_focus(entry)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Takes the filter."""
        if event.input.id == "filter":
            self._close_filter()
            self._filter_by(one_line(event.value))

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        if not self._commands.has_focus:
            self.screen.set_focus(self._fleet)

    def _filter_by(self, text: str) -> None:
        if self._filter_worker is not None:
            self._filter_worker.cancel()
        self._filter, self._filter_worker, self._filter_text = None, None, text
        self._operations.message = ""
        words: tuple[str, ...] = ()
        if is_expression(text):
            self._filter = FilterFeed(self._client, text)
            self._filter_worker = self.run_worker(self._filter.run(), exit_on_error=True)
        else:
            words = tuple(text.casefold().split())
        self._look(replace(self._view, words=words))

    # Operations

    @property
    def _selected(self) -> Row | None:
        """The selected row of the list that has the focus."""
        return self._commands.selected if self._commands.has_focus else self._fleet.selected

    def action_suspend(self) -> None:
        """Suspends the workload of the row."""
        self._operations.suspend(self._selected)

    def action_restore(self) -> None:
        """Restores the parked workload of the row."""
        self._operations.restore(self._selected)

    def action_stop(self) -> None:
        """Stops the workload of the row."""
        self._operations.stop(self._selected)

    def action_cancel_command(self) -> None:
        """Cancels the command of the row, or the open command about its workload."""
        self._operations.cancel_command(self._selected)

    def action_move(self) -> None:
        """Begins a move. The next Enter chooses the target."""
        self._operations.begin_move(self._selected)

    def action_cordon(self) -> None:
        """Cordons or uncordons the host or the GPU of the row."""
        self._operations.cordon(self._selected)
