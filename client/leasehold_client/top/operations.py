"""The operations of the keys of ``leasehold top``: what each acts on, its confirmation, and its outcome."""

from collections.abc import Callable
from functools import partial
from typing import final

from leasehold.v1.access_service_pb2 import Role
from leasehold.v1.command_pb2 import Command
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload
from textual.app import App

from leasehold_client.aio.client import AsyncClient
from leasehold_client.arguments.gpu_names import gpu_place, with_places
from leasehold_client.display.terminal_text import one_line
from leasehold_client.errors import LeaseholdError, UsageError
from leasehold_client.messages import command_state, operation_name
from leasehold_client.top import actions
from leasehold_client.top.actions import Action
from leasehold_client.top.contact import Contact
from leasehold_client.top.dialogs import ConfirmDialog, ReasonDialog
from leasehold_client.top.fleet_model import FleetModel
from leasehold_client.top.row_text import progress_text
from leasehold_client.top.rows import Row, SlotRow, command_about
from leasehold_client.top.selection import (
    cordon_target,
    departure_of,
    has_own_cordon,
    open_command,
    workload_of,
)


@final
class Operations:
    """The operations on rows, which the user confirms in dialogs.

    Args:
        app: Shows the dialogs.
        client: The client.
        model: The fleet. A stored command is added.
        contact: The role of the caller.
        caller: The calling user, for cordons.

    Attributes:
        message: The last message for the user. Empty: none.
    """

    def __init__(
        self, app: App[None], client: AsyncClient, model: FleetModel, contact: Contact, caller: str
    ) -> None:
        self.message = ""
        self._app = app
        self._client = client
        self._model = model
        self._contact = contact
        self._caller = caller
        self._departure: tuple[Workload, FleetGpu | None] | None = None
        """A move without a target yet: the workload, and the GPU that it leaves. No GPU: it is parked."""
        self._own_command_ids: set[str] = set()
        """Commands of this session whose outcomes are not told yet."""

    @property
    def is_moving(self) -> bool:
        """Whether a move waits for its target."""
        return self._departure is not None

    @property
    def text(self) -> str:
        """The move that waits for its target, or the last message. Empty: neither."""
        if self._departure is None:
            return self.message
        workload, source = self._departure
        place = f" from {gpu_place(source)}" if source is not None else ""
        return f"Move {workload.name}{place}: choose its slot with the arrows, then Enter. Esc leaves it."

    def leave(self) -> None:
        """Leaves a move that waits for its target, and the last message."""
        self._departure = None
        self.message = ""

    def suspend(self, row: Row | None) -> None:
        """Suspends the workload of a row."""
        self._attempt(lambda: actions.suspend(self._client, workload_of(row, "s")))

    def restore(self, row: Row | None) -> None:
        """Restores the parked workload of a row."""
        self._attempt(lambda: actions.restore(self._client, workload_of(row, "r")))

    def stop(self, row: Row | None) -> None:
        """Stops the workload of a row."""
        self._attempt(lambda: actions.stop(self._client, self._model, workload_of(row, "x")))

    def cancel_command(self, row: Row | None) -> None:
        """Cancels the command of a row, or the open command about its workload."""

        def make() -> Action:
            command = open_command(row, self._model)
            return actions.cancel(self._client, self._model, command, command_about(self._model, command))

        self._attempt(make)

    def begin_move(self, row: Row | None) -> None:
        """Begins a move of the workload of a row. :meth:`end_move` has the target."""
        self._departure = None
        try:
            departure = departure_of(row)
        except UsageError as error:
            self._tell(error.message)
            return
        if self._may("remap", actions.USER):
            self._departure = departure

    def end_move(self, row: Row) -> None:
        """Takes the slot of a row as the target of the move that was begun."""
        if self._departure is None:
            return
        if not isinstance(row, SlotRow):
            self._tell("choose a GPU of the host: press Right to open a host")
            return
        workload, source = self._departure

        def make() -> Action:
            if source is None:
                gpus = list(self._model.gpus.values.values())
                return actions.restore(self._client, workload, row.gpu, gpus)
            return actions.move(self._client, workload, source, row.gpu, row.workload)

        self._attempt(make)

    def cordon(self, row: Row | None) -> None:
        """Cordons or uncordons the host or the GPU of a row."""
        try:
            target = cordon_target(row)
        except UsageError as error:
            self._tell(error.message)
            return
        worker = self._model.workers.values.get(target.worker_id)
        if has_own_cordon(target, worker):
            is_cordoned = worker is not None and worker.HasField("cordon")
            self._attempt(lambda: actions.uncordon(self._client, target, is_worker_cordoned=is_cordoned))
        elif self._may("cordon", actions.OPERATOR):
            about = target.name if isinstance(target, Worker) else gpu_place(target)
            self._app.push_screen(ReasonDialog(about), partial(self._cordon, target))

    def tell_outcomes(self) -> None:
        """Tells the outcome of a command of this session, once it has ended.

        A command that ended during an outage is not in the snapshot after it, so it is read.
        """
        for command_id in self._own_command_ids & self._model.ended_commands.keys():
            self._own_command_ids.discard(command_id)
            command = self._model.ended_commands[command_id]
            text = f"{operation_name(command)} {command_state(command)}: {progress_text(command)}"
            self.message = with_places(one_line(text), self._model.places())
        if self._model.commands.is_complete:
            for command_id in self._own_command_ids - self._model.commands.values.keys():
                self._own_command_ids.discard(command_id)
                self._app.run_worker(self._read(command_id), exit_on_error=True)

    async def _read(self, command_id: str) -> None:
        """Reads a command of this session, whose outcome is told at the next update."""
        try:
            command = await self._client.command(command_id)
        except LeaseholdError as error:
            self._tell(f"the outcome of command {command_id} is unknown: {error.message}")
        else:
            self._own_command_ids.add(command_id)
            self._model.put_command(command)

    def _cordon(self, target: Worker | FleetGpu, reason: str | None) -> None:
        if reason is not None:
            self._confirm(actions.cordon(self._client, target, reason, self._caller))

    def _attempt(self, make: Callable[[], Action]) -> None:
        """Asks for the confirmation of an operation, or says why there is none."""
        self._departure = None
        try:
            action = make()
        except UsageError as error:
            self._tell(error.message)
        else:
            self._confirm(action)

    def _confirm(self, action: Action) -> None:
        """Shows the plan of an operation and asks, if the role permits the operation."""
        if self._may(action.verb, action.role):
            self._app.push_screen(ConfirmDialog(action, self._model, self._tell), self._begun)

    def _begun(self, command: Command | None) -> None:
        """Shows a command that was stored."""
        if command is not None:
            self._own_command_ids.add(command.command_id)
            self._model.put_command(command)
            self.message = ""

    def _may(self, verb: str, role: Role.ValueType) -> bool:
        """Whether the caller's role permits an operation. If not, says so."""
        if refusal := self._contact.not_permitted(verb, role):
            self._tell(refusal)
        return not refusal

    def _tell(self, message: str) -> None:
        self.message = one_line(message)
