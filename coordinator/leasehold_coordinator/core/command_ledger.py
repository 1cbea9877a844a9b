"""The unfinished commands: events in, an ordered list of effects out. Pure.

Nothing here waits, reads a clock or touches the store. The caller must carry out effects in order, so that a
command is stored before it is sent or acknowledged. The ledger holds each command twice: in its newest state,
and as last stored. :meth:`CommandLedger.kept` confirms a write, and :meth:`CommandLedger.revert` undoes the
step of a failed write.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Final, final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.worker.v1.session_pb2 import CommandUpdate

from leasehold_coordinator.command_workloads import workload_ids
from leasehold_coordinator.core.command_effects import (
    Acknowledge,
    Effect,
    Note,
    Send,
    Store,
    StoredCommand,
    is_overdue,
)
from leasehold_coordinator.core.command_states import (
    ACCEPTED,
    CANCELLED,
    DISPATCHED,
    EXPIRED,
    FAILED,
    OUTCOMES,
    PENDING,
    REJECTED,
    RUNNING,
    SUCCEEDED,
    UNKNOWN,
    is_terminal,
    may_follow,
)
from leasehold_coordinator.core.request_ids import scoped_id
from leasehold_coordinator.core.secret_variables import blank_secrets
from leasehold_coordinator.errors import FleetError

SENT_LIMIT: Final = 8
"""Most unfinished commands of one worker that are sent. Further commands wait in the coordinator."""

USERS_SENT_LIMIT: Final = SENT_LIMIT - 1
"""From this number of sent commands on, only operators' commands are sent. One user has half of them."""

UNFINISHED_LIMIT: Final = 512
"""Most unfinished commands of one worker, sent or waiting. One client may have half of them."""

REPORTED: Final = OUTCOMES | {ACCEPTED, RUNNING}
"""The states that workers report."""


@final
class CommandLedger:
    """The unfinished commands, by id, worker, workload and request.

    Args:
        stored: The unfinished commands in the store, oldest first.
    """

    def __init__(self, stored: Iterable[StoredCommand] = ()) -> None:
        self.commands: dict[str, StoredCommand] = {}
        """By id, oldest first."""
        self.on_disk: dict[str, StoredCommand] = {}
        """Commands as last stored, by id. Only these are shown or sent. A new command is not yet here."""
        self._by_worker: dict[str, dict[str, None]] = {}
        self._by_workload: dict[str, dict[str, None]] = {}
        self._by_request: dict[str, str] = {}
        self.jumped_ns = 0
        """Clock jumps since the coordinator started, in total. Ages of commands leave jumps out."""
        self._clients: dict[str, str] = {}
        """The client of each command that was created since the coordinator started."""
        self._of_operators: set[str] = set()
        """Ids of the commands of operators that were created since the coordinator started."""
        self._actors: Counter[str] = Counter()
        """Number of the commands of each actor."""
        self.load(stored)

    def load(self, stored: Iterable[StoredCommand]) -> None:
        """Adds commands that the store holds, oldest first."""
        for one in stored:
            self.kept(self._put(one))

    def _put(self, stored: StoredCommand) -> StoredCommand:
        command = stored.command
        if command.command_id not in self.commands:
            self._by_worker.setdefault(command.worker_id, {})[command.command_id] = None
            for workload_id in workload_ids(command):
                self._by_workload.setdefault(workload_id, {})[command.command_id] = None
            if command.request_id:
                self._by_request[scoped_id(command)] = command.command_id
            self._actors[command.actor] += 1
        self.commands[command.command_id] = stored
        return stored

    def _drop(self, stored: StoredCommand) -> None:
        command = stored.command
        if self.commands.pop(command.command_id, None) is None:
            return
        self._by_request.pop(scoped_id(command), None)
        self._actors[command.actor] -= 1
        if not self._actors[command.actor]:
            del self._actors[command.actor]
        places = [(self._by_worker, command.worker_id)]
        places += [(self._by_workload, workload_id) for workload_id in workload_ids(command)]
        for index, key in places:
            index[key].pop(command.command_id, None)
            if not index[key]:
                del index[key]

    def of_worker(self, worker_id: str) -> list[StoredCommand]:
        """Commands of a worker, oldest first."""
        return [self.commands[command_id] for command_id in self._by_worker.get(worker_id, ())]

    def stored_of_worker(self, worker_id: str) -> list[str]:
        """Ids of a worker's commands that are on disk, oldest first."""
        return [command_id for command_id in self._by_worker.get(worker_id, ()) if command_id in self.on_disk]

    def of_workload(self, workload_id: str) -> list[StoredCommand]:
        """Commands that name a workload, oldest first."""
        return [self.commands[command_id] for command_id in self._by_workload.get(workload_id, ())]

    def of_actor(self, actor: str) -> int:
        """Number of the commands that an identity asked for."""
        return self._actors[actor]

    def of_request(self, request_id: str) -> StoredCommand | None:
        """The unfinished command that a request created, by the request's scoped id."""
        command_id = self._by_request.get(request_id)
        return self.commands[command_id] if command_id is not None else None

    def current(self, effect: Store) -> StoredCommand | None:
        """The newest state to store for an effect. None: the command has ended, and its end is stored."""
        if is_terminal(effect.after.command.state):
            return effect.after
        return self.commands.get(effect.after.command.command_id)

    def kept(self, stored: StoredCommand) -> None:
        """Confirms that a command is on disk in this state."""
        command_id = stored.command.command_id
        if is_terminal(stored.command.state):
            self.on_disk.pop(command_id, None)
            self._forget_client(command_id)
        elif command_id in self.commands or command_id in self.on_disk:
            self.on_disk[command_id] = stored

    def _forget_client(self, command_id: str) -> None:
        """Forgets who created a command, once it can't be unfinished again."""
        self._clients.pop(command_id, None)
        self._of_operators.discard(command_id)

    def unstored(self, command_ids: Iterable[str]) -> list[StoredCommand]:
        """Of these commands, the unfinished ones whose stored state is outdated."""
        found = [(self.commands.get(command_id), self.on_disk.get(command_id)) for command_id in command_ids]
        return [stored for stored, on_disk in found if stored and on_disk and stored is not on_disk]

    def revert(self, effect: Store) -> None:
        """Undoes a step that could not be stored, unless a later step followed.

        An accepted command stays accepted: otherwise a worker that loses its journal would get it again.
        """
        command = effect.after.command
        before = self.on_disk.get(command.command_id)
        if before is None:
            self._drop(effect.after)
            self._forget_client(command.command_id)
        elif self.commands.get(command.command_id) is (None if is_terminal(command.state) else effect.after):
            was_noted = effect.after.accepted and not before.accepted
            self._put(replace(before, accepted=True) if was_noted else before)

    def has_room(self, worker_id: str, client: str) -> bool:
        """Whether a client may add a command: it must have fewer of the worker's places than are free."""
        unfinished = self.of_worker(worker_id)
        of_client = sum(self._client(stored) == client for stored in unfinished)
        return of_client < UNFINISHED_LIMIT - len(unfinished)

    def note_operators(self, is_operator: Callable[[str], bool]) -> None:
        """Notes which commands from before a restart are those of operators.

        A command on behalf of a user counts as that of a user, also if its actor is an operator.

        Args:
            is_operator: Whether an actor is one.
        """
        self._of_operators.update(
            command_id
            for command_id, stored in self.commands.items()
            if not stored.command.on_behalf_of and is_operator(stored.command.actor)
        )

    def _client(self, stored: StoredCommand) -> str:
        """The client of a command. After a restart of the coordinator, the actor counts as the client."""
        return self._clients.get(stored.command.command_id, stored.command.actor)

    def _has_place(self, client: str, *, is_operator: bool, sent: Counter[str]) -> bool:
        """Whether another command of a client may be sent, given the numbers of sent commands by client.

        An operator needs a free place. A user must have fewer places than are free for users, so that nobody
        takes all places with long commands.
        """
        if is_operator:
            return sent.total() < SENT_LIMIT
        return sent[client] < USERS_SENT_LIMIT - sent.total()

    def _next(self, worker_id: str) -> StoredCommand | None:
        """The next command to send to a worker. None: no waiting command has a place.

        The client with the fewest sent commands goes first, with its oldest waiting command.
        """
        unfinished = self.of_worker(worker_id)
        sent = self._sent(unfinished)
        waiting = [
            stored
            for stored in unfinished
            if stored.command.state == PENDING
            and not stored.accepted  # of an older store, whose question could not be stored
            and stored.command.command_id in self.on_disk
            and self._has_place(
                self._client(stored),
                is_operator=stored.command.command_id in self._of_operators,
                sent=sent,
            )
        ]
        return min(waiting, key=lambda stored: sent[self._client(stored)], default=None)

    def _sent(self, unfinished: Iterable[StoredCommand]) -> Counter[str]:
        """Numbers of sent commands, by client."""
        return Counter(self._client(stored) for stored in unfinished if stored.command.state != PENDING)

    def advance(self, worker_id: str, instance_id: str, now: Timestamp) -> Iterator[list[Effect]]:
        """Sends waiting commands of a worker. A step is taken only when the iterator reaches it.

        A step that can't be stored is the last one: the next would fail, too, and the same command is next.
        """
        while (stored := self._next(worker_id)) is not None:
            yield self._send(stored, instance_id, now)
            sent = self.commands.get(stored.command.command_id)
            if sent is not None and sent.command.state == PENDING:
                return

    def create(
        self,
        command: Command,
        now: Timestamp,
        instance_id: str | None,
        client: str = "",
        request_digest: bytes = b"",
        *,
        is_operator: bool = False,
    ) -> list[Effect]:
        """Adds a new command.

        Args:
            command: The command, without state.
            now: The current time.
            instance_id: The connected instance of its worker. None: not connected, so the command waits.
            client: The caller that the places of the worker count by.
            request_digest: Digest of the request. Empty: the request has no id.
            is_operator: Whether the client is an operator, or Leasehold itself.
        """
        unfinished = self.of_worker(command.worker_id)
        is_behind = any(
            stored.command.state == PENDING and self._client(stored) == client for stored in unfinished
        )
        has_place = self._has_place(client, is_operator=is_operator, sent=self._sent(unfinished))
        waits = instance_id is None or is_behind or not has_place
        command.state = PENDING if waits else DISPATCHED
        self._clients[command.command_id] = client
        if is_operator:
            self._of_operators.add(command.command_id)
        command.revision = 1
        command.create_time.CopyFrom(now)
        command.update_time.CopyFrom(now)
        sent_to = "" if waits else instance_id or ""
        stored = self._put(
            StoredCommand(command, sent_to, jumped_ns=self.jumped_ns, request_digest=request_digest)
        )
        kept: list[Effect] = [Store(stored)]
        return kept if waits else [*kept, Send(stored)]

    def welcome(
        self,
        worker_id: str,
        instance_id: str,
        held: set[str],
        now: Timestamp,
        earlier: Container[str] | None = None,
        *,
        is_restored: bool = False,
        can_ask: bool = False,
    ) -> list[Effect]:
        """Compares the ledger with a worker's hello. Frames of the worker's older sessions no longer count.

        Args:
            worker_id: The worker.
            instance_id: Its present instance.
            held: Ids of the commands that the worker has.
            now: The current time.
            earlier: Ids of the commands that were on disk when the session began. Newer commands are sent by
                their creation, and the hello can't name them. None: all commands.
            is_restored: The store is older than the worker's memory, such as a backup. A command that the
                worker does not name may have ended, and is not sent again.
            can_ask: The worker understands questions about a command's state.
        """
        effects: list[Effect] = []
        for stored in self.of_worker(worker_id):
            if earlier is not None and stored.command.command_id not in earlier:
                continue
            unknown_there = stored.command.command_id not in held
            overdue = is_overdue(stored, now, self.jumped_ns)
            if stored.command.state == PENDING and not (is_restored or overdue or stored.accepted):
                continue  # never sent, so it waits for its turn
            if unknown_there and can_ask and (stored.accepted or is_restored):
                effects += self._ask(stored, instance_id, now)
            elif stored.accepted and unknown_there:
                effects += self._end(stored, FAILED, now, _JOURNAL_LOST.to_proto())
            elif unknown_there and overdue:
                effects += self._end(stored, EXPIRED, now, _NEVER_RECEIVED.to_proto())
            else:
                effects += self._send(stored, instance_id, now)
        return effects

    def _ask(self, stored: StoredCommand, instance_id: str, now: Timestamp) -> list[Effect]:
        """Asks a worker for an outcome, which its journal keeps for a day.

        A command that may have ended there is never sent, not even if the session ends before the answer.
        """
        command = stored.command
        if command.state == PENDING:
            command = _changed(command, DISPATCHED, now)
        elif stored.accepted:
            return [Send(stored, ask=True)]
        asked = self._put(replace(stored, command=command, instance_id=instance_id, accepted=True))
        return [Store(asked), Send(asked, ask=True)]

    def _send(self, stored: StoredCommand, instance_id: str, now: Timestamp) -> list[Effect]:
        command = stored.command
        if command.state == PENDING:
            command = _changed(command, DISPATCHED, now)
        sent = replace(stored, command=command, instance_id=instance_id)
        effects: list[Effect] = []
        if sent != self.on_disk.get(command.command_id):
            effects.append(Store(self._put(sent)))
        effects.append(Send(sent))
        if sent.cancel_requested:
            effects.append(Send(sent, cancel=True))
        return effects

    def update(self, worker_id: str, update: CommandUpdate, now: Timestamp) -> list[Effect]:
        """Applies a worker's update of a command. An impossible update has no effect."""
        stored = self.commands.get(update.command_id)
        acknowledgement = Acknowledge(worker_id, update.command_id)
        if stored is None:  # its outcome is stored, or the command is unknown
            return [acknowledgement] if is_terminal(update.state) else []
        was_sent = stored.command.worker_id == worker_id and update.command_id in self.on_disk
        if not was_sent or not may_follow(stored.command.state, update.state):
            return []
        if update.state == REJECTED and update.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_COMMAND:
            return self._end(stored, FAILED, now, _JOURNAL_LOST.to_proto())
        if is_terminal(update.state):
            error = update.error if update.HasField("error") else None
            result = update.result if update.HasField("result") else None
            if update.state in (SUCCEEDED, FAILED):  # the other outcomes may precede the acceptance
                stored = replace(stored, accepted=True)
            return [*self._end(stored, update.state, now, error, result), acknowledgement]
        command = _changed(stored.command, update.state, now, update.phase)
        return [Note(self._put(replace(stored, command=command, accepted=True)))]

    def _end(
        self,
        stored: StoredCommand,
        state: CommandState.ValueType,
        now: Timestamp,
        error: errors_pb2.Error | None = None,
        result: command_pb2.CommandResult | None = None,
    ) -> list[Effect]:
        return [self._over(stored, state, now, error, result)]

    def _over(
        self,
        stored: StoredCommand,
        state: CommandState.ValueType,
        now: Timestamp,
        error: errors_pb2.Error | None = None,
        result: command_pb2.CommandResult | None = None,
    ) -> Store:
        self._drop(stored)
        command = _changed(stored.command, state, now)
        command.end_time.CopyFrom(now)
        if command.operation.run.spec.secret_environment:
            blank_secrets(command.operation.run.spec)
        if error is not None:
            command.error.CopyFrom(error)
        if result is not None:
            command.result.CopyFrom(result)
        return Store(replace(stored, command=command))

    def delete_worker(self, worker_id: str, error: FleetError, now: Timestamp) -> list[Store]:
        """Ends every command of a deleted worker. The caller stores all steps in one write."""
        return [
            self._over(stored, FAILED, now, error.to_proto())
            for stored in self.of_worker(worker_id)
            if stored.command.command_id in self.on_disk
        ]

    def cancel(self, command_id: str, now: Timestamp) -> list[Effect]:
        """Cancels a command: at once if it was not sent, otherwise by asking its worker, now or later.

        The worker is asked once per session, however often clients ask: the frame has the whole command.
        """
        stored = self.commands.get(command_id)
        if stored is None or command_id not in self.on_disk or stored.cancel_requested:
            return []
        if stored.command.state == PENDING and not stored.accepted:
            return self._end(stored, CANCELLED, now, _CANCELLED_UNSENT.to_proto())
        command = Command()
        command.CopyFrom(stored.command)
        command.cancel_requested = True
        command.revision += 1
        command.update_time.CopyFrom(now)
        asked = self._put(replace(stored, command=command, cancel_requested=True))
        return [Store(asked), Send(asked, cancel=True)]

    def tick(
        self,
        now: Timestamp,
        instance_of: Callable[[str], str | None],
        is_out_of_contact: Callable[[str], bool],
    ) -> Iterator[list[Effect]]:
        """The steps that are due: expiry, dispatch, and UNKNOWN for commands of workers out of contact.

        A step is taken only when the iterator reaches it. The caller carries out each step before the next.

        Args:
            now: The current time.
            instance_of: Returns the connected instance of a worker. None: the worker has no session.
            is_out_of_contact: Whether a worker counts as out of contact.
        """
        jumped_ns = self.jumped_ns  # fixed, as `now` is: the iteration may take a while
        advanced: set[str] = set()
        for command_id in list(self.commands):
            stored = self.commands.get(command_id)
            if stored is None or command_id not in self.on_disk:
                continue
            command = stored.command
            overdue = is_overdue(stored, now, jumped_ns)
            instance_id = instance_of(command.worker_id)
            if command.state == PENDING and not stored.accepted:
                if overdue:
                    yield self._end(stored, EXPIRED, now, _NEVER_SENT.to_proto())
                elif instance_id is not None and command.worker_id not in advanced:
                    advanced.add(command.worker_id)  # each time looks at all commands of the worker
                    yield from self.advance(command.worker_id, instance_id, now)
            elif (
                command.state != UNKNOWN
                and instance_id is None
                and (overdue or is_out_of_contact(command.worker_id))
            ):
                unknown = _changed(command, UNKNOWN, now)
                unknown.error.CopyFrom(_OUT_OF_CONTACT.to_proto())
                yield [Store(self._put(replace(stored, command=unknown)))]


def _changed(command: Command, state: CommandState.ValueType, now: Timestamp, phase: str = "") -> Command:
    changed = Command()
    changed.CopyFrom(command)
    changed.state = state
    changed.phase = phase
    changed.ClearField("error")
    changed.revision += 1
    changed.update_time.CopyFrom(now)
    return changed


_JOURNAL_LOST: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERRUPTED,
    "the worker's journal has lost the command, so its outcome is unknown: look at the workload",
    concluded_by="coordinator",
)
_NEVER_RECEIVED: Final = FleetError(
    errors_pb2.ERROR_REASON_EXPIRED,
    "the command did not reach its worker within its timeout and was not executed: try again",
)
_NEVER_SENT: Final = FleetError(
    errors_pb2.ERROR_REASON_EXPIRED,
    "the command was not sent within its timeout and was not executed, since its worker was out of contact "
    "or had earlier commands: try again",
)
_CANCELLED_UNSENT: Final = FleetError(errors_pb2.ERROR_REASON_CANCELLED, "cancelled before it was sent")
_OUT_OF_CONTACT: Final = FleetError(
    errors_pb2.ERROR_REASON_OUTCOME_UNKNOWN,
    "the worker is out of contact: the outcome is unknown until the worker connects again",
)
