"""Carries out the decisions of the command ledger: stores commands and sends them to workers."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import errors_pb2, worker_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import CommandAck, CommandFrame, CommandUpdate, ConnectResponse

from leasehold_coordinator.access.secret_vault import SealError
from leasehold_coordinator.command_workloads import workload_ids
from leasehold_coordinator.core.command_effects import Acknowledge, Effect, Note, Send, Store, frame_of
from leasehold_coordinator.core.command_ledger import REPORTED, UNFINISHED_LIMIT
from leasehold_coordinator.core.command_states import FAILED, OUTCOMES, PENDING, is_terminal
from leasehold_coordinator.core.secret_variables import blank_secrets
from leasehold_coordinator.crash_points import crash_point
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import command_rows, refused_command_rows
from leasehold_coordinator.fleet.caller_bounds import COMMAND_LIMIT
from leasehold_coordinator.fleet.callers import counted_caller, current_caller
from leasehold_coordinator.fleet.command_ends import outcome_name, reason_name, verb_of
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.frame_rules import check_command_of
from leasehold_coordinator.fleet.permissions import is_operator
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.fleet.workload_news import find_ended, news
from leasehold_coordinator.log_context import log_context
from leasehold_coordinator.shielded_tasks import start
from leasehold_coordinator.storage.rows import AuditRow, Change, workload_row
from leasehold_coordinator.timestamps import jumped_ns, now_timestamp
from leasehold_coordinator.tracing import trace_id

logger = logging.getLogger(__name__)

ASK_MINOR: Final = 3
"""The first minor version of the protocol in which a worker answers a question about a command's state."""

NOTE_DELAY_S: Final = 0.05
"""How long a step towards an outcome waits to share a write with other steps. A fast command ends before."""

STEPS: Final = REPORTED - OUTCOMES
"""States that workers report and that are no outcome. Nothing waits for their write."""

KEY_LOST: Final = FleetError(
    errors_pb2.ERROR_REASON_SPAWN_FAILED,
    "the key of its secret variables is lost, so the command was not sent and nothing was done: create the "
    "workload again, with the values",
)

OUT_OF_CONTACT: Final = (worker_pb2.WORKER_STATE_LOST, worker_pb2.WORKER_STATE_DISCONNECTED)


@final
class Dispatcher:
    """Moves commands through their states."""

    def __init__(self, fleet: Fleet, caller_limit: int = COMMAND_LIMIT) -> None:
        self._fleet = fleet
        self._caller_limit = caller_limit
        self._ends: dict[str, asyncio.Event] = {}
        """By command, while its outcome is being stored. The write may still fail."""
        self._noted: dict[str, None] = {}
        """Ids of commands with a step that is not on disk yet. A dict keeps their order."""
        self._is_noting = False
        """Whether a write of the noted steps is scheduled."""
        self._unreadable: set[str] = set()
        """Ids of unsent commands whose secret variables can't be decrypted. The next tick ends them."""

    def check_room(self, worker_id: str, workload_ids: Sequence[str]) -> None:
        """Refuses a command for a busy workload, or for a worker at its limit of commands.

        Raises:
            FleetError: WORKLOAD_BUSY or TOO_MANY_COMMANDS.
        """
        for refusal in self.refusals(worker_id, workload_ids):
            raise refusal

    def refusals(self, worker_id: str, workload_ids: Sequence[str]) -> Iterator[FleetError]:
        """A refusal for each unfinished command of these workloads, and for the worker's limit."""
        ledger = self._fleet.ledger
        busy = {
            stored.command.command_id: stored
            for workload_id in workload_ids
            for stored in ledger.of_workload(workload_id)
        }
        for stored in busy.values():
            yield stored.busy_error()
        caller = current_caller()
        if caller is not None and not caller.is_local_admin:
            unfinished = ledger.of_actor(str(caller.identity))
            if unfinished >= self._caller_limit:
                yield FleetError(
                    errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
                    f"{unfinished} commands of {caller.identity} have not ended, of at most "
                    f"{self._caller_limit} of one caller: try again later",
                    bound="caller_commands",
                )
        if not ledger.has_room(worker_id, counted_caller()):
            yield FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
                f"{len(ledger.of_worker(worker_id))} commands of the worker have not ended, of at most "
                f"{UNFINISHED_LIMIT} of all clients: try again later",
            )

    def _now(self) -> Timestamp:
        """The current time. Also tells the ledger by how much the clock has jumped."""
        self._fleet.ledger.jumped_ns = jumped_ns()
        return now_timestamp()

    def create(
        self, command: Command, workload: Workload | None = None, request_digest: bytes = b""
    ) -> Coroutine[Any, Any, None]:
        """Adds a command to the ledger at once, and the workload that the command creates, if any.

        Args:
            command: The command, without state.
            workload: The workload that the command creates. None: the command creates none.
            request_digest: Digest of the request. Empty: the request has no id.

        Returns:
            A coroutine that stores both and sends the command. If the store fails, both are undone.
        """
        crash_point("request-checked")
        session = self._fleet.sessions.get(command.worker_id)
        instance_id = session.hello.instance_id if session is not None else None
        effects = self._fleet.ledger.create(
            command,
            self._now(),
            instance_id,
            counted_caller(),
            request_digest,
            is_operator=is_operator(),
        )
        self._fleet.traces.begin(command)
        if workload is not None:
            self._fleet.workloads[workload.workload_id] = workload
        return self._store_created(effects, command, workload, command_rows(command))

    async def _store_created(
        self,
        effects: Sequence[Effect],
        command: Command,
        workload: Workload | None,
        audited: Sequence[AuditRow],
    ) -> None:
        trace = trace_id(self._fleet.traces.of(command.command_id))
        with log_context(command=command.command_id, workload=command.workload_id, trace=trace):
            try:
                if workload is None:
                    await self._carry_out(effects, audited)
                else:
                    with self._fleet.workload_being_created(workload):
                        await self._carry_out(effects, [workload_row(workload), *audited])
            except FleetError:
                self._fleet.traces.drop(command)
                raise
            _log_creation(command)
        if command.state == PENDING:  # earlier commands may have ended meanwhile
            start(self._advance(command.worker_id))

    async def welcome(self, session: Session) -> None:
        """Compares a hello with the ledger: ends commands that the worker lost, and sends unfinished ones."""
        if not self._fleet.reader.is_current(session):
            return
        hello = session.hello
        held = {*hello.commands_in_flight, *hello.commands_unacknowledged}
        ledger = self._fleet.ledger
        if session.is_restored:
            logger.warning("worker %s remembers later sessions than the store: is it a backup?", hello.name)
        effects = ledger.welcome(
            hello.worker_id,
            hello.instance_id,
            held,
            self._now(),
            session.earlier,
            is_restored=session.is_restored,
            can_ask=hello.protocol_version.minor >= ASK_MINOR,
        )
        session.welcomed = True
        await self._carry_out(effects)
        await self._advance(hello.worker_id)

    async def _advance(self, worker_id: str) -> None:
        """Sends the waiting commands of a worker, up to the worker's limit.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next tick tries again.
        """
        instance_id = self._instance_of(worker_id)
        if instance_id is not None:
            for effects in self._fleet.ledger.advance(worker_id, instance_id, self._now()):
                await self._carry_out(effects)

    def take(self, session: Session, update: CommandUpdate) -> Coroutine[Any, Any, None] | None:
        """Applies a worker's update of a command. Returns the remaining work: None for most steps.

        Raises:
            FleetError: PROTOCOL_VIOLATION, the command is for another worker.
        """
        stored = self._fleet.ledger.commands.get(update.command_id)
        if stored is not None:
            check_command_of(stored, session.hello.worker_id)
        is_step = update.state in STEPS and not update.workloads
        if not is_step or update.command_id in self._ends:
            return self.update(session, update)
        crash_point("update-received")
        for effect in self._effects(session, update):
            if isinstance(effect, Note):
                self._note(effect.after.command.command_id)
        return None

    async def update(self, session: Session, update: CommandUpdate) -> None:
        """Applies a worker's update of a command. An outcome is acknowledged once it is stored."""
        stored = self._fleet.ledger.commands.get(update.command_id)
        with self._log_context(session, update.command_id):
            await self._update(session, update)
            if stored is not None and is_terminal(update.state):
                _log_end(stored.command, update)

    def _log_context(self, session: Session, command_id: str) -> AbstractContextManager[None]:
        stored = self._fleet.ledger.commands.get(command_id)
        return log_context(
            session=session.session_id,
            worker=session.hello.name,
            command=command_id,
            workload=stored.command.workload_id if stored is not None else "",
            trace=trace_id(self._fleet.traces.of(command_id)),
        )

    async def _update(self, session: Session, update: CommandUpdate) -> None:
        worker_id = session.hello.worker_id
        crash_point("update-received")
        if update.state not in REPORTED:
            logger.warning("ignored an update to state %d", update.state)
            return
        over = await find_ended(self._fleet.reader, update.workloads)
        while (end := self._ends.get(update.command_id)) is not None:
            await end.wait()
            over = await find_ended(self._fleet.reader, update.workloads)
        if not self._fleet.reader.is_current(session):  # the worker reports again in its next session
            return
        workloads = news(self._fleet.reader, update.workloads, over, session)
        rows = self._fleet.report_rows(workloads, over, session)
        effects = self._effects(session, update)
        ends = [effect.after.command for effect in effects if isinstance(effect, Store)]
        if ends:  # one write for an outcome, its workloads and the audit
            await self._carry_out(effects, [*rows, *refused_command_rows(ends[0])], workloads)
        else:
            await self._fleet.save_workloads(workloads, rows=rows)
            await self._carry_out(effects)
        if is_terminal(update.state):
            await self._advance(worker_id)

    def _effects(self, session: Session, update: CommandUpdate) -> list[Effect]:
        """The ledger's effects of an update. An impossible update is logged and ignored."""
        worker_id = session.hello.worker_id
        stored = self._fleet.ledger.commands.get(update.command_id)
        is_new = update.command_id not in session.repeated_command_ids
        if stored is not None and is_new and update.HasField("result") and session.known is not None:
            ids = workload_ids(stored.command)
            self._fleet.registry.apply_result(session.known, update.result, ids)
        effects = self._fleet.ledger.update(worker_id, update, self._now())
        if not effects and stored is not None and stored.command.state != update.state:
            # A worker that has restarted reports its open commands as ACCEPTED again.
            level = logging.DEBUG if update.state in STEPS else logging.WARNING
            with self._log_context(session, update.command_id):
                logger.log(
                    level,
                    "ignored an update to %s: the command is %s",
                    outcome_name(update.state),
                    outcome_name(stored.command.state),
                )
        return effects

    async def cancel(self, command: Command) -> Command:
        """Cancels a command: at once if it was not sent, otherwise by asking its worker."""
        effects = self._fleet.ledger.cancel(command.command_id, self._now())
        await self._carry_out(effects, command_rows(command))
        return await self._fleet.reader.find_command(command.command_id) or command

    async def tick(self) -> None:
        """Expires overdue commands, sends waiting ones, and marks commands of absent workers UNKNOWN.

        Ends commands whose secret variables can't be decrypted.

        Raises:
            FleetError: STORAGE_UNAVAILABLE, some steps were not taken. The next tick tries again.
        """
        refusal: FleetError | None = None
        if self._noted and not self._is_noting:  # an earlier write failed
            await self._store_noted()
        for command_id in list(self._unreadable):
            try:
                await self._end_unreadable(command_id)
            except FleetError as error:
                refusal = error
        for effects in self._fleet.ledger.tick(self._now(), self._instance_of, self._is_out_of_contact):
            try:
                await self._carry_out(effects)
            except FleetError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    async def _end_unreadable(self, command_id: str) -> None:
        """Ends a command that its worker can't get, unless the command has ended.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next tick tries again.
        """
        stored = self._fleet.ledger.commands.get(command_id)
        if stored is not None:
            update = CommandUpdate(command_id=command_id, state=FAILED, error=KEY_LOST.to_proto())
            effects = self._fleet.ledger.update(stored.command.worker_id, update, self._now())
            await self._carry_out([effect for effect in effects if isinstance(effect, Store)])
        self._unreadable.discard(command_id)

    def _instance_of(self, worker_id: str) -> str | None:
        """The connected instance of a worker. None: no session, or its hello is not yet compared."""
        session = self._fleet.sessions.get(worker_id)
        return session.hello.instance_id if session is not None and session.welcomed else None

    def _is_out_of_contact(self, worker_id: str) -> bool:
        known = self._fleet.registry.get(worker_id)
        return known is not None and self._fleet.reader.worker(known).state in OUT_OF_CONTACT

    def _note(self, command_id: str) -> None:
        """Schedules a command for the next shared write."""
        self._noted[command_id] = None
        if not self._is_noting:
            self._is_noting = True
            asyncio.get_running_loop().call_later(NOTE_DELAY_S, self._begin_to_store_noted)

    def _begin_to_store_noted(self) -> None:
        start(self._store_noted())

    async def _store_noted(self) -> None:
        """Stores all noted steps in one write.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next tick tries again.
        """
        noted, self._noted, self._is_noting = self._noted, {}, False
        stored = self._fleet.ledger.unstored(noted)
        try:
            await self._fleet.save_workloads((), stored)
        except FleetError:
            self._noted = noted | self._noted
            raise
        if stored:
            crash_point("command-stored")

    async def _carry_out(
        self, effects: Sequence[Effect], rows: Sequence[Change] = (), workloads: Sequence[Workload] = ()
    ) -> None:
        """Carries out the ledger's effects in order. If the store fails, the remaining effects are skipped.

        Args:
            effects: The effects. A frame goes to the session that the worker has when the frame is sent.
            rows: Rows to store in the same write as the first command.
            workloads: Workloads to apply and to store in the same write.

        Raises:
            FleetError: STORAGE_UNAVAILABLE.
        """
        ends = [
            effect.after.command.command_id
            for effect in effects
            if isinstance(effect, Store) and is_terminal(effect.after.command.state)
        ]
        for command_id in ends:
            self._ends[command_id] = asyncio.Event()
        try:
            await self._do(effects, rows, workloads)
        finally:
            for command_id in ends:
                self._ends.pop(command_id).set()

    async def _do(
        self, effects: Sequence[Effect], rows: Sequence[Change], workloads: Sequence[Workload]
    ) -> None:
        for number, effect in enumerate(effects):
            match effect:
                case Store():
                    try:
                        await self._store(effect, rows, workloads)
                    except FleetError:
                        left = [step for step in effects[number:] if isinstance(step, Store)]
                        for step in reversed(left):
                            self._fleet.ledger.revert(step)
                        ids = [step.after.command.command_id for step in left]
                        for stored in self._fleet.ledger.unstored(ids):  # the acceptance may be unstored
                            self._note(stored.command.command_id)
                        raise
                    rows, workloads = (), ()
                case Note(stored):
                    self._note(stored.command.command_id)
                case Send(stored):
                    to = self._fleet.sessions.get(stored.command.worker_id)
                    if to is not None and stored.command.command_id in self._fleet.ledger.commands:
                        frame = frame_of(effect, to.epoch, now_timestamp(), jumped_ns())
                        workload = self._fleet.workloads.get(stored.command.workload_id)
                        frame.command.owner = workload.owner if workload is not None else ""
                        frame.command.trace_parent = self._fleet.traces.of(stored.command.command_id)
                        if not self._reveal(frame):
                            if not (stored.accepted or _has(to, frame.command.command_id)):
                                self._unreadable.add(frame.command.command_id)
                                continue
                            frame.ask = True  # the worker has the values
                            blank_secrets(frame.command.operation.run.spec)
                        to.send(ConnectResponse(command=frame))
                        crash_point("command-sent")
                case Acknowledge(worker_id, command_id):
                    to = self._fleet.sessions.get(worker_id)
                    if to is not None:
                        to.send(ConnectResponse(command_ack=CommandAck(command_id=command_id)))
                        crash_point("outcome-acknowledged")

    def _reveal(self, frame: CommandFrame) -> bool:
        """Decrypts the secret variables of a run in its frame. False: they can't be decrypted.

        A frame that only cancels or asks carries no value.
        """
        command, spec = frame.command, frame.command.operation.run.spec
        if frame.cancel or frame.ask:
            blank_secrets(spec)
            return True
        try:
            for name, sealed in list(spec.secret_environment.items()):
                value = self._fleet.vault.reveal(command.workload_id, name, sealed)
                spec.secret_environment[name] = value
        except SealError as error:
            logger.error("command %s can't be sent: %s", command.command_id, error)
            return False
        return True

    async def _store(self, effect: Store, rows: Sequence[Change], workloads: Sequence[Workload]) -> None:
        stored = self._fleet.ledger.current(effect)
        if stored is None:
            return
        await self._fleet.save_command(stored, rows, workloads)
        crash_point("outcome-stored" if is_terminal(stored.command.state) else "command-stored")

    async def reconcile_workloads(self, session: Session, workloads: Sequence[Workload]) -> None:
        """Applies the workloads of a hello. An expected workload that the hello lacks becomes FAILED."""
        await self._fleet.apply_workloads(workloads, session, is_complete=True)


def _has(session: Session, command_id: str) -> bool:
    """Whether the worker named a command in its hello."""
    hello = session.hello
    return command_id in hello.commands_in_flight or command_id in hello.commands_unacknowledged


def _log_creation(command: Command) -> None:
    """Logs who asked for a command, once the command is stored."""
    verb = verb_of(command)
    actor = f"{command.actor} for {command.on_behalf_of}" if command.on_behalf_of else command.actor
    logger.info("%s created for worker %s by %s", verb, command.worker_id, actor, extra={"verb": verb})


def _log_end(command: Command, update: CommandUpdate) -> None:
    """Logs how a command ended. The log context names the command and its workload."""
    result = update.result
    duration_s = result.duration.ToNanoseconds() / 1e9 if result.HasField("duration") else None
    verb, outcome = verb_of(command), outcome_name(update.state)
    error = update.error if update.HasField("error") else None
    logger.log(
        logging.WARNING if update.state == FAILED else logging.INFO,
        "%s %s%s%s",
        verb,
        outcome,
        "" if duration_s is None else f" after {duration_s:.3f} s",
        f": {error.message}" if error else "",
        extra={
            "verb": verb,
            "outcome": outcome,
            **({} if duration_s is None else {"duration_s": duration_s}),
            **({"reason": reason_name(error)} if error else {}),
        },
    )
