"""Dialogs: the confirmation of an operation after its plan, the reason of a cordon, and texts to read."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, final

from leasehold.v1.command_pb2 import Command
from leasehold.v1.plan_pb2 import Plan
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from leasehold_client.arguments.gpu_names import with_places
from leasehold_client.display.plan_view import plan_lines
from leasehold_client.display.terminal_text import one_line, safe_text
from leasehold_client.errors import LeaseholdError, UsageError
from leasehold_client.messages import reason_name
from leasehold_client.top.actions import Action
from leasehold_client.top.fleet_model import FleetModel

REASON_LIMIT: Final = 256
"""Longest reason of a cordon in characters."""

FRAME_HEIGHT: Final = 6
"""Lines of a dialog and around it that its text can't have."""

EFFECT_S: Final = 0.1
"""Time between two updates of an effect."""

_SCROLLING: Final[list[BindingType]] = [
    Binding("up", "scroll(-1)", show=False),
    Binding("down", "scroll(1)", show=False),
    Binding("pageup", "scroll(-10)", show=False),
    Binding("pagedown", "scroll(10)", show=False),
]


class _TextScreen(ModalScreen[Command | None]):
    """A title, a text that can be scrolled, and a line with the keys."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        """The parts of the dialog. No text is markup."""
        with Vertical(classes="dialog"):
            yield Static(safe_text(one_line(self._title)), classes="dialog-title", markup=False)
            with VerticalScroll(classes="dialog-body", can_focus=False):
                yield Static("", classes="dialog-text", markup=False)
            yield Static("", classes="dialog-keys", markup=False)

    def on_resize(self) -> None:
        """Leaves room for the title, the keys and the frame."""
        body = self.query_one(".dialog-body", VerticalScroll)
        body.styles.max_height = max(1, self.size.height - FRAME_HEIGHT)

    def write(self, lines: Sequence[str], keys: str) -> None:
        """Replaces the text and the line with the keys, unless textual has removed them at the end."""
        for place, text in ((".dialog-text", safe_text("\n".join(lines))), (".dialog-keys", keys)):
            for part in self.query(place).results(Static):
                part.update(text)

    def action_scroll(self, lines: int) -> None:
        """Scrolls the text."""
        self.query_one(".dialog-body", VerticalScroll).scroll_relative(y=lines, animate=False)


@final
class TextDialog(_TextScreen):
    """A text to read, which stays current.

    Args:
        title: The title.
        lines: The present text.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*_SCROLLING, Binding("escape,enter,q,question_mark", "close")]

    def __init__(self, title: str, lines: Callable[[], Sequence[str]]) -> None:
        super().__init__(title)
        self._lines = lines

    def on_mount(self) -> None:
        """Shows the text."""
        self._refresh()
        self.set_interval(1.0, self._refresh)

    def _refresh(self) -> None:
        self.write(self._lines(), "up/down scroll   Esc close")

    def action_close(self) -> None:
        """Closes the dialog."""
        self.dismiss(None)


@final
class ConfirmDialog(_TextScreen):
    """Shows what an operation would do, and asks whether to do it. The result is the stored command.

    Args:
        action: The operation.
        model: The fleet, for names.
        tell: Shows a message below the lists, after the dialog was closed before the answer.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *_SCROLLING,
        Binding("y", "confirm"),
        Binding("escape,n,q", "close"),
    ]

    def __init__(self, action: Action, model: FleetModel, tell: Callable[[str], None]) -> None:
        super().__init__(f"{action.verb} {action.about}")
        self._action = action
        self._model = model
        self._tell = tell
        self._effect = ""
        self._may_confirm = False
        self._is_asking = False

    def on_mount(self) -> None:
        """Shows the effect, which stays current, or asks for the plan."""
        if self._action.plan is None:
            self._may_confirm = True
            self._update_effect()
            self.set_interval(EFFECT_S, self._update_effect)
        else:
            self.write(["asking the worker for the plan …"], "Esc close")
            self.run_worker(self._show_plan(), exit_on_error=True)

    def _update_effect(self) -> bool:
        """Shows the present effect of an operation that has no plan. Returns whether it has changed."""
        if self._action.effect is None or not self._may_confirm:
            return False
        try:
            effect = self._action.effect()
        except UsageError as error:
            self._may_confirm = False
            self._refuse(error)
            return True
        is_new, self._effect = effect != self._effect, effect
        if is_new:
            self._offer([effect])
        return is_new

    async def _show_plan(self) -> None:
        assert self._action.plan is not None  # noqa: S101 - on_mount checks it
        try:
            plan = await self._action.plan()
        except LeaseholdError as error:
            self._refuse(error)
            return
        gpus = self._model.gpus.values.values()
        lines = plan_lines(plan, self._action.about, self._action.verb, gpus, self._names(plan))
        if plan.refusals:
            places = self._model.places()
            refusals = [
                f"REFUSED: {with_places(one_line(error.message), places)} ({reason_name(error.reason)})"
                for error in plan.refusals
            ]
            self.write([*refusals, "", *lines], "nothing was changed   Esc close")
        else:
            self._offer(lines)

    def _names(self, plan: Plan) -> dict[str, str]:
        """Names of workloads by id. Empty for a plan of one workload."""
        ids = {member.workload_id for member in plan.members} | {check.workload_id for check in plan.checks}
        if len(ids - {""}) < 2:
            return {}
        return {workload_id: self._model.workload_name(workload_id) for workload_id in ids - {""}}

    def _offer(self, lines: Sequence[str]) -> None:
        self._may_confirm = True
        self.write(lines, f"y {self._action.verb}   Esc leave as it is")

    def _refuse(self, error: LeaseholdError) -> None:
        reason = f" ({error.reason})" if error.reason else ""
        message = with_places(one_line(error.message), self._model.places())
        self.write([f"{message}{reason}"], "Esc close")

    def action_confirm(self) -> None:
        """Creates the command, once. If the effect has changed, shows the new one instead, and asks again."""
        if self._may_confirm and not self._update_effect():
            self._may_confirm = False
            self._is_asking = True
            self.write(["asking the coordinator …"], "Esc close: the command may be stored")
            self.run_worker(self._execute(), exit_on_error=True)

    async def _execute(self) -> None:
        try:
            command = await self._action.execute()
        except LeaseholdError as error:
            self._is_asking = False
            self._refuse(error)
        else:
            if self._is_asking:  # or else the dialog is closed
                self.dismiss(command)

    def action_close(self) -> None:
        """Closes the dialog. Before the answer of the coordinator, this cancels the call."""
        if self._is_asking:
            self._is_asking = False
            about = f"{self._action.verb} {self._action.about}"
            self._tell(f"{about}: closed before the answer. The command may have been stored: see Commands")
        self.dismiss(None)


@final
class ReasonDialog(ModalScreen[str | None]):
    """Asks for the reason of a cordon.

    Args:
        about: The worker or GPU.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close")]

    def __init__(self, about: str) -> None:
        super().__init__()
        self._about = about

    def compose(self) -> ComposeResult:
        """The parts of the dialog."""
        with Vertical(classes="dialog"):
            yield Static(safe_text(f"cordon {one_line(self._about)}"), classes="dialog-title", markup=False)
            yield Input(placeholder="reason, which lists and refusals show")
            yield Static("Enter continue   Esc leave as it is", classes="dialog-keys", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Takes a reason that is neither empty nor too long.

        A second Enter, before the dialog has gone, changes nothing.
        """
        text = one_line(event.value)
        problem = "" if text else "the reason is empty: give one"
        if len(text) > REASON_LIMIT:
            problem = f"the reason has {len(text)} characters: give at most {REASON_LIMIT}"
        if problem:
            self.query_one(".dialog-keys", Static).update(f"{problem}   Esc leave as it is")
        elif self.is_current:  # textual would close the screen below
            self.dismiss(text)

    def action_close(self) -> None:
        """Closes the dialog."""
        self.dismiss(None)
