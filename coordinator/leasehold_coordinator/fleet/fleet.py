"""The write path of the fleet: each change of a worker, workload or command is stored, and then published.

Unfinished workloads and commands are held in memory and written through. Ended ones are read from the store.
Everything here runs on the event loop's thread.
:mod:`leasehold_coordinator.fleet.fleet_reader` is what readers are handed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, final

from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.event_pb2 import Event
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.access.join_tokens import JoinTokens
from leasehold_coordinator.access.secret_vault import SecretVault
from leasehold_coordinator.access.worker_bindings import WorkerBinding, WorkerBindings
from leasehold_coordinator.core.client_views import command_view
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.command_states import RUNNING, SUCCEEDED, UNKNOWN, is_terminal
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.operation_rules import creates_workload
from leasehold_coordinator.core.workload_reports import failed
from leasehold_coordinator.core.workload_states import is_ended, state_name
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import binding_rows, change_rows, host_rows
from leasehold_coordinator.fleet.audit_refusals import AuditRefusals
from leasehold_coordinator.fleet.bound_workers import find_binding
from leasehold_coordinator.fleet.command_ends import count_end
from leasehold_coordinator.fleet.command_traces import CommandTraces
from leasehold_coordinator.fleet.event_log import Events
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.lease_history import LeaseHistory
from leasehold_coordinator.fleet.refusals import Refusals
from leasehold_coordinator.fleet.retention import publish_deleted_commands, publish_deleted_workloads
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.fleet.worker_news import WorkerNews
from leasehold_coordinator.fleet.workload_news import find_ended, news
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.enrolment_rows import binding_row, read_bindings, read_join_tokens
from leasehold_coordinator.storage.rows import (
    AuditRow,
    Change,
    CommandsOf,
    Gone,
    command_row,
    deletion_row,
    event_row,
    worker_row,
    workload_row,
)
from leasehold_coordinator.storage.statements import DELETE_LIMIT
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import now_timestamp

logger = logging.getLogger(__name__)

DELETED: Final = FleetError(
    errors_pb2.ERROR_REASON_WORKER_DELETED,
    "an operator deleted the record of the worker, so the outcome is unknown: look at the worker's host",
    concluded_by="coordinator",
)


@final
class Fleet:
    """Changes the fleet, for sessions and for the commands and requests of clients.

    Args:
        store: The store.
        load_interval_s: Time between two loads of a worker, in a small fleet.
        vault: Encrypts secret variables of workloads.
        is_store_restored: Whether the store is an older copy, so that workers may know later epochs.
    """

    def __init__(
        self, store: Store, load_interval_s: float, vault: SecretVault, *, is_store_restored: bool = False
    ) -> None:
        self.vault = vault
        self.is_store_restored = is_store_restored
        self.reader = FleetReader(store, load_interval_s)
        self.store = store
        self.registry = self.reader.registry
        self.sessions = self.reader.sessions
        self.workloads = self.reader.workloads
        self.ledger = self.reader.ledger
        self.events = Events(store, self.reader.event_hub)
        self.refusals = Refusals(self.events)
        self.audit = AuditRefusals(store)
        self.lease_history = LeaseHistory(store, self.workloads, self.registry)
        self.worker_news = WorkerNews(self.reader, self.events, self.lease_history)
        self.traces = CommandTraces()
        self.join_tokens = JoinTokens()
        self.bindings = WorkerBindings()
        self.enrolling = asyncio.Lock()
        """Held by each change of join tokens and bindings, so that one is made at a time."""
        self._unstored: set[str] = set()
        """Ids of workers that lost GPUs to other workers by a hello whose write failed."""
        self._workload_names: dict[str, str] = {}
        """By id of an unfinished command: the name of its workload, which may end before the command."""

    async def load(self) -> None:
        """Loads from the store what has not ended, the workers, join tokens and bindings."""
        for stored in await self.store.workers():
            self.registry.add_stored(stored.hello, stored.epoch, left=stored.has_left)
        for workload in await self.store.live_workloads():
            self.workloads[workload.workload_id] = workload
        self.ledger.load(await self.store.open_commands())
        self.worker_news.load(known.hello.worker_id for known in self.registry)
        await self._load_lease_history()
        for token in await read_join_tokens(self.store):
            self.join_tokens.put(token)
        for binding in await read_bindings(self.store):
            self.bindings.put(binding)

    async def _load_lease_history(self) -> None:
        spans = await self.store.open_lease_spans()
        over = {one.workload_id for one in spans if one.parked} - self.workloads.keys()
        ended = await self.store.find_workloads(sorted(over))
        parked = {key for key, one in self.workloads.items() if one.status.HasField("park_time")}
        last_ends_ns = await self.store.last_span_ends(sorted(parked - {one.workload_id for one in spans}))
        self.lease_history.load(spans, {one.workload_id: one for one in ended}, last_ends_ns)

    @asynccontextmanager
    async def new_binding(self, hello: Hello, *, is_certified: bool) -> AsyncIterator[WorkerBinding | None]:
        """The context in which a hello is checked and saved, with its new binding. None: nothing changes.

        No other binding changes in the context of a new binding. Other hellos do not wait.

        Raises:
            FleetError: As :func:`leasehold_coordinator.fleet.bound_workers.find_binding`.
        """
        if self._find_binding(hello, is_certified=is_certified) is None:
            yield None
            return
        async with self.enrolling:
            yield self._find_binding(hello, is_certified=is_certified)  # it may have changed meanwhile

    def _find_binding(self, hello: Hello, *, is_certified: bool) -> WorkerBinding | None:
        restored = self.is_store_restored
        return find_binding(
            self.bindings, self.registry, hello, is_certified=is_certified, is_restored=restored
        )

    async def save_worker(
        self,
        hello: Hello,
        epoch: int,
        robbed: Sequence[KnownWorker] = (),
        binding: WorkerBinding | None = None,
        address: str = "",
    ) -> None:
        """Stores a worker's epoch, hello and binding, and the workers that lost GPUs, and publishes those.

        Args:
            hello: The hello.
            epoch: The epoch.
            robbed: The workers that lost GPUs to the worker.
            binding: The new binding, in its context :meth:`new_binding`. None: it stays.
            address: The worker's host, for the audit of the binding.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The binding stays as before, and the next call for any worker
                stores the losses of GPUs.
        """
        lost, self._unstored = self._unstored | {known.hello.worker_id for known in robbed}, set()
        found = map(self.registry.get, lost - {hello.worker_id})
        others = [known for known in found if known is not None]
        rows: list[Change] = [worker_row(known.epoch, known.hello, has_left=known.left) for known in others]
        if binding is not None:
            rows += [binding_row(binding), *binding_rows(binding, address)]
        try:
            with self.bindings.being_stored(binding):
                await self.store.write(worker_row(epoch, hello), *rows)
        except (FleetError, asyncio.CancelledError):
            self._unstored |= lost
            raise
        for known in others:
            if self.registry.get(known.hello.worker_id) is known:
                self.worker_news.publish(known)

    async def save_departure(self, known: KnownWorker) -> None:
        """Stores that a worker has left, unless it has a newer session.

        A write failure is logged only: the worker is then UNCONFIRMED, and later LOST, after the next start.
        """
        if self.registry.get(known.hello.worker_id) is not known or not known.left:
            return
        try:
            await self.store.write(worker_row(known.epoch, known.hello, has_left=True))
        except FleetError as error:
            logger.warning("the goodbye of worker %s is not stored: %s", known.hello.name, error.message)

    async def apply_workload(self, reported: Workload, session: Session) -> None:
        """Applies a worker's report of one of its workloads, if the report is newer than the record.

        Raises:
            FleetError: As :meth:`apply_workloads`.
        """
        await self.apply_workloads([reported], session)

    async def apply_workloads(
        self, reports: Sequence[Workload], session: Session, *, is_complete: bool = False
    ) -> None:
        """Applies a worker's reports of its workloads, if they are newer than the records.

        One write stores all of them. If the session is over, all are dropped: the next hello repeats them.

        Args:
            reports: The reported workloads.
            session: The session of the reports.
            is_complete: The reports list all workloads of the worker. A missing workload has failed.

        Raises:
            FleetError: PROTOCOL_VIOLATION, a report is invalid. TOO_MANY_CALLS, too many live workloads are
                unknown. STORAGE_UNAVAILABLE. Nothing has changed.
        """
        over = await find_ended(self.reader, reports)
        if self.reader.is_current(session):
            changed = news(self.reader, reports, over, session, is_complete=is_complete)
            rows = self.report_rows(changed, over, session)
            await self.save_workloads(changed, rows=rows, was_away=is_complete)

    def report_rows(
        self, changed: Sequence[Workload], over: Mapping[str, Workload | None], session: Session
    ) -> list[AuditRow]:
        """The rows of the audit of a worker's reports, to be stored together with the changed workloads.

        Args:
            changed: The result of :func:`news`, which is not saved yet.
            over: The result of :func:`find_ended`.
            session: The session of the reports.
        """
        return [
            row
            for one in changed
            for row in host_rows(
                one,
                session.address,
                is_new=one.workload_id not in self.workloads and over.get(one.workload_id) is None,
            )
        ]

    async def save_workload(self, workload: Workload) -> None:
        """Updates a workload in memory, stores it, and then publishes it."""
        await self.save_workloads([workload])

    async def save_workloads(
        self,
        workloads: Sequence[Workload],
        commands: Sequence[StoredCommand] = (),
        rows: Sequence[Change] = (),
        worker_name: str = "",
        *,
        has_events: bool = True,
        was_away: bool = False,
    ) -> None:
        """Updates workloads in memory, stores all arguments in one write, then publishes the changes.

        Args:
            workloads: The new states of workloads.
            commands: The new states of commands.
            rows: Other rows to store.
            worker_name: The name of the commands' worker, if the registry has forgotten the worker.
            has_events: Whether new states of the workloads are events.
            was_away: Whether the workloads changed while their worker was away.
        """
        if not workloads and not commands and not rows:
            return
        before = {one.workload_id: self.workloads.pop(one.workload_id, None) for one in workloads}
        live = {one.workload_id: one for one in workloads if not is_ended(one.status.state)}
        self.workloads.update(live)
        for workload in workloads:  # before the write, which may take long
            is_new = before[workload.workload_id] is None
            self.lease_history.note_workload(workload, was_away=was_away or is_new)
        events: list[Event] = []
        for workload in workloads:
            earlier = before[workload.workload_id]
            if has_events and (earlier is None or _condition(earlier) != _condition(workload)):
                event = self.events.of_workload(workload, self._displacing(earlier, workload))
                if event is not None:
                    events.append(event)
        for stored in filter(self._is_news, commands):
            event = self._event_of(stored.command, workloads, worker_name)
            if event is not None:
                events.append(event)
        stored_rows = (*map(workload_row, workloads), *map(command_row, commands), *map(event_row, events))
        try:
            with self.workloads.being_stored(before, {one.workload_id: one for one in workloads}):
                await self.store.write(*rows, *stored_rows)
        except FleetError:
            self.lease_history.note_undone(before)
            raise
        for workload in workloads:
            self.reader.report_bounds.charge(before[workload.workload_id], workload)
            self._publish_workload(workload)
        for stored in commands:
            is_news = self._is_news(stored)
            self.ledger.kept(stored)
            subject = self.workloads.get(stored.command.workload_id)
            if subject is not None and stored.command.command_id in self.ledger.commands:
                self._workload_names[stored.command.command_id] = subject.name
            if is_terminal(stored.command.state):
                self._workload_names.pop(stored.command.command_id, None)
                self.reader.recent.add(stored.command)
                count_end(stored.command)
                self.traces.end(stored.command)
            if is_news:
                response = WatchCommandsResponse(command=command_view(stored.command))
                self.reader.command_hub.publish(stored.command.command_id, response)
        for event in events:
            self.events.publish(event)

    def _displacing(self, earlier: Workload | None, workload: Workload) -> str:
        """Id of the running command of another workload that suspends or moves this one. Empty: none.

        Lists show an ended command with its first workload only. So the events of the others name it.
        """
        state = workload.status.state
        if earlier is None or earlier.status.state == state or is_ended(state):
            return ""  # a command of others did not do that
        open_commands = (stored.command for stored in self.ledger.of_workload(workload.workload_id))
        of_others = (one for one in open_commands if one.workload_id != workload.workload_id)
        return next((one.command_id for one in of_others if one.state in (RUNNING, UNKNOWN)), "")

    def _publish_workload(self, workload: Workload) -> None:
        response = WatchWorkloadsResponse(workload=self.reader.view(workload))
        self.reader.workload_hub.publish(workload.workload_id, response)

    def _is_news(self, stored: StoredCommand) -> bool:
        """Whether clients see another state of a command than the one on disk."""
        before = self.ledger.on_disk.get(stored.command.command_id)
        return before is None or before.command.revision != stored.command.revision

    def _event_of(self, command: Command, workloads: Sequence[Workload], worker_name: str) -> Event | None:
        saved = (one for one in workloads if one.workload_id == command.workload_id)
        workload = self.workloads.get(command.workload_id) or next(saved, None)
        name = self._workload_names.get(command.command_id, command.workload_id)
        known = self.registry.get(command.worker_id)
        return self.events.of_command(
            command,
            workload_name=workload.name if workload else name,
            worker_name=known.hello.name if known else worker_name or command.worker_id,
            slots={gpu.uuid: gpu.slot for gpu in known.hello.gpus} if known else {},
        )

    async def save_command(
        self, stored: StoredCommand, rows: Sequence[Change] = (), workloads: Sequence[Workload] = ()
    ) -> None:
        """Stores a command together with workloads and other rows, and then publishes the changes.

        If the command failed to create its workload, the same write makes the workload FAILED. A workload of
        which its worker has told more may still run, and its worker tells its end.
        """
        command = stored.command
        changed = {one.workload_id: one for one in workloads}
        workload = changed.get(command.workload_id) or self.workloads.get(command.workload_id)
        has_failed = is_terminal(command.state) and command.state != SUCCEEDED
        is_pending = workload is not None and workload.status.state == workload_pb2.WORKLOAD_STATE_PENDING
        if workload is not None and has_failed and is_pending and creates_workload(command.operation):
            changed[workload.workload_id] = failed(workload, command.error, now_timestamp())
        await self.save_workloads([*changed.values()], [stored], rows)

    @contextmanager
    def workload_being_created(self, workload: Workload) -> Iterator[None]:
        """The context of the write of a new workload. Watchers get the workload after the write."""
        workload_id = workload.workload_id
        with self.workloads.being_stored({workload_id: None}, {workload_id: workload}):
            yield
        self._publish_workload(workload)

    async def update_workload(self, workload: Workload) -> None:
        """Stores a workload whose labels or annotations have changed, and then tells watchers."""
        audited = change_rows(f"workload/{workload.workload_id}")
        await self.save_workloads([workload], rows=audited, has_events=False)

    async def delete_workload(self, workload: Workload) -> int:
        """Deletes the record of a workload that has ended, and those of its commands that have ended.

        The worker may report the workload again. The report of a deleted workload changes nothing, unless the
        workload lives.

        Returns:
            The number of deleted commands.

        The first commit has the workload, its row of the audit, and up to 500 commands. If a later commit
        fails, retention deletes the commands that are left.

        Raises:
            FleetError: WRONG_STATE, WORKLOAD_BUSY or STORAGE_UNAVAILABLE. Nothing has changed.
        """
        workload_id = workload.workload_id
        present = self.workloads.get(workload_id, workload)  # its worker may have reported it again meanwhile
        if not is_ended(present.status.state):
            raise _still_lives(present)
        for stored in self.ledger.of_workload(workload_id):
            raise stored.busy_error()
        event = self.events.workload_deleted(workload)
        rows: list[Change] = [Gone(schema.workloads, workload_id), deletion_row(workload), event_row(event)]
        rows += change_rows(f"workload/{workload_id}")
        commands = CommandsOf(workload_id)
        await self.store.write(commands, *rows)
        publish_deleted_commands(self.reader, commands.deleted)
        publish_deleted_workloads(self.reader, [workload_id])
        self.events.publish(event)
        count = len(commands.deleted)
        try:
            while len(commands.deleted) == DELETE_LIMIT:
                commands = CommandsOf(workload_id)
                await self.store.write(commands)
                publish_deleted_commands(self.reader, commands.deleted)
                count += len(commands.deleted)
        except FleetError as error:
            logger.warning("commands of the deleted workload %s are left: %s", workload.name, error.message)
        return count

    async def delete_worker(self, known: KnownWorker) -> list[str]:
        """Deletes the record of a worker that is not connected, and fails its workloads and commands.

        If the worker connects again, it counts as a new worker, and reports its live workloads again. The
        caller holds :attr:`enrolling`.

        Returns:
            Ids of the workloads that became FAILED.

        Raises:
            FleetError: WORKER_CONNECTED or STORAGE_UNAVAILABLE. Nothing has changed.
        """
        worker_id = known.hello.worker_id
        if worker_id in self.sessions:
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKER_CONNECTED,
                f"worker {known.hello.name} ({worker_id}) is connected: stop it first",
                worker=worker_id,
            )
        error = DELETED.to_proto()
        workloads = [
            failed(workload, error, now_timestamp()) for workload in self.workloads.of_worker(worker_id)
        ]
        steps = self.ledger.delete_worker(worker_id, DELETED, now_timestamp())
        bound = self.bindings.of_worker(worker_id)
        unbound = [Gone(schema.worker_bindings, bound.name)] if bound is not None else []
        self.registry.forget(known)
        try:
            await self.save_workloads(
                workloads,
                [step.after for step in steps],
                [Gone(schema.workers, worker_id), *unbound, *change_rows(f"worker/{worker_id}")],
                worker_name=known.hello.name,
            )
        except FleetError:
            if self.registry.get(worker_id) is None:
                self.registry.add(known)
                self.lease_history.note_undone(one.workload_id for one in workloads)
            for step in reversed(steps):
                self.ledger.revert(step)
            raise
        if bound is not None:
            self.bindings.remove(bound.name)
        if self.registry.get(worker_id) is None:  # it has not connected meanwhile
            self.worker_news.publish_deleted(known)
        return [workload.workload_id for workload in workloads]


def _still_lives(workload: Workload) -> FleetError:
    return FleetError(
        errors_pb2.ERROR_REASON_WRONG_STATE,
        f"workload {workload.name} is {state_name(workload.status.state)}, and only a workload that has "
        f"ended can be deleted: stop it first, with `leasehold stop {workload.name}`",
        workload_id=workload.workload_id,
    )


def _condition(workload: Workload) -> tuple[int, bool]:
    """The parts of a workload whose change is an event: its state and its readiness."""
    return workload.status.state, workload.status.HasField("ready_time")
