"""The coordinator's view of the fleet: workers, workloads and open commands, in memory and in the store.

Unfinished workloads and commands are held in memory and written through. Ended ones are read from the store.
Everything here runs on the event loop's thread.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, final

from leasehold.v1 import errors_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.event_pb2 import Event
from leasehold.v1.worker_pb2 import FleetGpu, Worker, WorkerState
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.core.client_views import gpu_views, worker_view, workload_view
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.command_ledger import CommandLedger
from leasehold_coordinator.core.command_states import SUCCEEDED, is_terminal
from leasehold_coordinator.core.gpu_conditions import Conditions, against, changes
from leasehold_coordinator.core.hello_rules import WORKLOAD_LIMIT, check_workload
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.operation_rules import creates_workload
from leasehold_coordinator.core.worker_registry import LOST_MIN_S, Registry
from leasehold_coordinator.core.workload_reports import is_concluded, is_presumed, registered, reported_again
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import LONG_AWAY_RETRY_S, FleetError
from leasehold_coordinator.fleet.change_hub import Hub
from leasehold_coordinator.fleet.event_log import Events
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads
from leasehold_coordinator.fleet.recent_commands import RecentCommands
from leasehold_coordinator.fleet.refusals import Refusals
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import (
    Change,
    Gone,
    OldRows,
    clock_row,
    command_row,
    event_row,
    worker_row,
    workload_row,
)
from leasehold_coordinator.storage.statements import DELETE_LIMIT
from leasehold_coordinator.storage.store import ANY_AGE_S, Store
from leasehold_coordinator.timestamps import now_timestamp

logger = logging.getLogger(__name__)

GONE: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERRUPTED,
    "the worker restarted and has lost the workload: look for its processes on the host, then run it again",
    concluded_by="coordinator",
)
"""The error of a workload that a worker's hello lacks. The end is only presumed: see :func:`is_presumed`."""


HISTORY_LIMIT_BYTES: Final = 8 * 2**30
"""Size of a SQLite store from which on ended workloads, ended commands and events are deleted at any age."""

PRUNE_ROUNDS: Final = 20
"""Most deletions by which one call of :meth:`Fleet.prune` shrinks a store that is too large."""

NAMED_LIMIT: Final = 8
"""Most ids that a refusal lists."""

FORGOTTEN: Final = FleetError(
    errors_pb2.ERROR_REASON_WORKER_FORGOTTEN,
    "an operator removed the worker from the records, so the outcome is unknown: look at the worker's host",
    concluded_by="coordinator",
)

LONG_AWAY: Final = ("LOST", "DISCONNECTED", "unknown")
"""States of a worker that does not come back by itself."""

SILENT: Final = (worker_pb2.WORKER_STATE_STALE, worker_pb2.WORKER_STATE_LOST)


@final
class Fleet:
    """The state that sessions, dispatch and the client API share."""

    def __init__(self, store: Store, load_interval_s: float) -> None:
        self.store = store
        self.registry = Registry(load_interval_s, time.monotonic())
        self.sessions: dict[str, Session] = {}
        """Live sessions by worker id."""
        self.workloads = LiveWorkloads()
        self.ledger = CommandLedger()
        """Unfinished commands."""
        self.fleet_hub: Hub[Worker | FleetGpu] = Hub()
        self.workload_hub: Hub[Workload] = Hub()
        self.command_hub: Hub[Command] = Hub(history_bytes=0)
        """No history, since a watch of a command begins with its state and is never resumed."""
        self._recent = RecentCommands()
        self.events = Events(store)
        self.refusals = Refusals(self.events)
        self.readers: Counter[str] = Counter()
        """Number of readers of output, by worker id."""
        self._published_states: dict[str, WorkerState.ValueType] = {}
        self._published_hellos: dict[str, Hello] = {}
        """The hello at the last publication, by worker id. Reveals removed GPUs."""
        self._told_conditions: dict[str, Conditions] = {}
        """The published conditions, by worker id. A restart of the coordinator publishes all again."""

    async def load(self) -> None:
        """Loads workers, live workloads and unfinished commands from the store."""
        for stored in await self.store.workers():
            self.registry.add_stored(stored.hello, stored.epoch)
        for workload in await self.store.live_workloads():
            self.workloads[workload.workload_id] = workload
        self.ledger = CommandLedger(await self.store.open_commands())

    async def prune(self, retention_s: float) -> None:
        """Deletes events, ended commands and ended workloads that are older than the retention.

        Age counts only time in which the store was served. If the store is too large, the oldest rows of the
        largest table are deleted at any age: a peer may fill the store faster than rows grow old. The choice
        of the largest table keeps a flood of events from deleting commands.
        """
        tables = (schema.commands, schema.workloads, schema.events)
        await self.store.write(clock_row(), *(OldRows(table, retention_s) for table in tables))
        used_bytes = await self.store.used_bytes()
        if used_bytes is None or used_bytes <= HISTORY_LIMIT_BYTES:
            return
        logger.warning(
            "the store has %d bytes, above its limit of %d: deleting the oldest of the most numerous among "
            "events, ended commands and ended workloads",
            used_bytes,
            HISTORY_LIMIT_BYTES,
        )
        counts = dict(zip(tables, await self.store.ended_counts(tables), strict=True))
        for _ in range(PRUNE_ROUNDS):
            largest = max(tables, key=lambda table: counts[table])
            await self.store.write(OldRows(largest, ANY_AGE_S))
            counts[largest] -= DELETE_LIMIT
            before_bytes, used_bytes = used_bytes, await self.store.used_bytes()
            if used_bytes is None or used_bytes <= HISTORY_LIMIT_BYTES or used_bytes == before_bytes:
                return

    def worker(self, known: KnownWorker) -> Worker:
        """A worker as clients see it."""
        return worker_view(known, self.registry.state(known, time.monotonic()))

    def gpus(self, known: KnownWorker) -> list[FleetGpu]:
        """A worker's GPUs with the names of their holders."""
        found = list(gpu_views(known))
        for gpu in found:
            holder = self.workloads.get(gpu.lease.workload_id)
            if holder is not None:
                gpu.workload_name = holder.name
        return found

    def view(self, workload: Workload) -> Workload:
        """A workload as clients see it."""
        known = self.registry.get(workload.worker_id)
        in_contact = self.is_in_contact(workload.worker_id)
        return workload_view(workload, in_contact=in_contact, seen=known.last_seen_time if known else None)

    def publish_worker(self, known: KnownWorker) -> None:
        """Publishes a worker and its GPUs to watchers."""
        worker, gpus = self.worker(known), self.gpus(known)
        before = self._published_hellos.get(worker.worker_id)
        if known.reported and before is not known.hello:
            if before is not None and _gpu_uuids(before) - _gpu_uuids(known.hello):
                self.fleet_hub.start_over(f"worker {worker.name} has fewer or other GPUs than before")
            self._published_hellos[worker.worker_id] = known.hello
        if self._published_states.get(worker.worker_id) != worker.state:
            self.events.worker(known, worker.state)
        self._published_states[worker.worker_id] = worker.state
        self._tell_conditions(known)
        self.fleet_hub.publish(worker.worker_id, worker)
        for gpu in gpus:
            self.fleet_hub.publish(gpu.gpu.uuid, gpu)

    def _tell_conditions(self, known: KnownWorker) -> None:
        worker_id, now = known.hello.worker_id, known.conditions
        slots = {gpu.uuid: gpu.slot for gpu in known.hello.gpus}
        for change in changes(self._told_conditions.get(worker_id, Conditions()), now):
            if change.gpu is None:
                self.events.condition(known, change)
                continue
            slot = slots.get(change.gpu.gpu_uuid, change.gpu.slot)
            self.events.condition(known, change, slot, self.workloads.get(change.gpu.workload_id))
        self._told_conditions.pop(worker_id, None)
        if (told := against(now)) is not None:
            self._told_conditions[worker_id] = told

    def publish_silent_workers(self) -> None:
        """Publishes workers whose state has changed only by the passing of time."""
        now = time.monotonic()
        for known in self.registry:
            worker_id, state = known.hello.worker_id, self.registry.state(known, now)
            if self._published_states.get(worker_id) != state:
                logger.info("worker %s is %s", known.hello.name, WorkerState.Name(state))
                self._published_states[worker_id] = state
                if state in SILENT:
                    self.registry.note_silence(known)
                self.events.worker(known, state)
                self.fleet_hub.publish(worker_id, self.worker(known))

    def end_lost_sessions(self) -> None:
        """Ends the streams of LOST workers: gRPC answers pings also for an agent that hangs.

        Commands of a worker become UNKNOWN only once the worker has no stream.
        """
        now = time.monotonic()
        for session in self.sessions.values():
            if (known := session.known) is None or now - known.last_seen < LOST_MIN_S:
                continue  # the common case: this runs twice per second for each worker
            if self.registry.state(known, now) == worker_pb2.WORKER_STATE_LOST:
                silent_s = now - known.last_seen
                session.end(
                    session_pb2.GOODBYE_REASON_UNSPECIFIED,
                    FleetError(
                        errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
                        f"worker {session.hello.name} sent nothing for {silent_s:.0f} s: connect again",
                        worker=session.hello.name,
                    ),
                )

    def is_current(self, session: Session) -> bool:
        """Whether a session is live: neither ended nor superseded."""
        return self.sessions.get(session.hello.worker_id) is session

    def is_in_contact(self, worker_id: str) -> bool:
        """Whether the worker has a session whose loads come in time."""
        known = self.registry.get(worker_id)
        return (
            known is not None
            and worker_id in self.sessions
            and self.registry.state(known, time.monotonic()) == worker_pb2.WORKER_STATE_CONNECTED
        )

    def holders(self, known: KnownWorker) -> list[Workload]:
        """The workloads that hold GPUs of a worker, as it last reported, oldest first."""
        holder_ids = {lease.workload_id for lease in known.leases}
        found = [self.workloads[holder_id] for holder_id in holder_ids if holder_id in self.workloads]
        return sorted(found, key=lambda found: (found.create_time.ToNanoseconds(), found.workload_id))

    def contact(self, worker_id: str) -> Session:
        """The session of a worker that is in contact.

        Raises:
            FleetError: WORKER_UNAVAILABLE.
        """
        if self.is_in_contact(worker_id):
            return self.sessions[worker_id]
        known = self.registry.get(worker_id)
        name = known.hello.name if known else worker_id
        state = worker_pb2.WorkerState.Name(self.worker(known).state)[13:] if known else "unknown"
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            f"worker {name} is {state}: start it again, or wait until it is connected",
            retry_after_s=LONG_AWAY_RETRY_S if state in LONG_AWAY else None,
            worker=name,
        )

    async def save_worker(self, hello: Hello, epoch: int, robbed: Sequence[KnownWorker] = ()) -> None:
        """Stores a worker's epoch and hello, and the workers that lost GPUs to it."""
        others = [worker_row(known.epoch, known.hello) for known in robbed]
        await self.store.write(worker_row(epoch, hello), *others)

    async def find_workload(self, id_or_name: str) -> Workload:
        """The workload with this id, or the newest with this name.

        Raises:
            FleetError: UNKNOWN_WORKLOAD, no workload fits, or several unfinished ones have the name. Workers
                choose names without asking the coordinator.
        """
        live = self.workloads.get(id_or_name)
        if live is None:
            named = self.workloads.named(id_or_name)
            if len(named) > 1:
                ids = sorted(workload.workload_id for workload in named)
                raise FleetError(
                    errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
                    f"{len(named)} workloads that have not ended are named {id_or_name!r}: "
                    f"give an id, one of {', '.join(ids[:NAMED_LIMIT])}",
                    field="workload",
                )
            live = named[0] if named else None
        found = live or await self.store.find_workload(id_or_name)
        if found is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
                f"no workload has the id or name {id_or_name!r}: `leasehold get workloads` lists them",
                field="workload",
            )
        return found

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
            FleetError: PROTOCOL_VIOLATION, a report is invalid. STORAGE_UNAVAILABLE. Nothing has changed.
        """
        over = await self.find_ended(reports)
        if self.is_current(session):
            await self.save_workloads(self.news(reports, over, session, is_complete=is_complete))

    async def find_ended(self, reports: Sequence[Workload]) -> dict[str, Workload]:
        """The records of reported workloads that have ended, by id.

        Raises:
            FleetError: PROTOCOL_VIOLATION, a report is invalid. STORAGE_UNAVAILABLE.
        """
        for reported in reports:
            check_workload(reported)
        unknown = [one.workload_id for one in reports if one.workload_id not in self.workloads]
        return {one.workload_id: one for one in await self.store.find_workloads(unknown)} if unknown else {}

    def news(
        self,
        reports: Sequence[Workload],
        over: Mapping[str, Workload],
        session: Session,
        *,
        is_complete: bool = False,
    ) -> list[Workload]:
        """The new records of workloads that a worker's reports change. The caller saves them.

        Args:
            reports: As for :meth:`apply_workloads`.
            over: The result of :meth:`find_ended`.
            session: As for :meth:`apply_workloads`.
            is_complete: As for :meth:`apply_workloads`.

        Raises:
            FleetError: PROTOCOL_VIOLATION, the worker has too many unfinished workloads.
        """
        worker_id, now = session.hello.worker_id, now_timestamp()
        changed: list[Workload] = []
        new = 0
        for reported in reports:
            known = self.workloads.get(reported.workload_id)
            owner = known or over.get(reported.workload_id)
            if owner is not None and owner.worker_id != worker_id:
                logger.warning("worker %s reported %s of another worker", worker_id, owner.workload_id)
            elif known is not None:
                if reported.status.generation > known.status.generation:
                    changed.append(reported_again(known, reported))
            elif owner is None and self._is_name_elsewhere(reported.workload_id, worker_id):
                # Requests find ids before names: a request for the other workload would reach this one.
                logger.warning(
                    "worker %s reported the id %s, which is the name of another worker's workload",
                    worker_id,
                    reported.workload_id,
                )
            elif owner is None:
                changed.append(registered(reported, worker_id, now))
                new += not is_ended(reported.status.state)
            elif is_presumed(owner) and not is_presumed(reported):
                logger.warning("workload %s had not ended: its worker reported it again", owner.workload_id)
                changed.append(reported_again(owner, reported))
        if (
            new
            and (count := len(self.workloads.of_worker(worker_id)) + new) > WORKLOAD_LIMIT
            and not is_complete
        ):
            raise FleetError(
                errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
                f"{count} workloads that have not ended are too many for one worker: the limit is "
                f"{WORKLOAD_LIMIT}",
                field="workload",
            )
        if is_complete:
            reported_ids = {one.workload_id for one in reports}
            changed += [
                _failed(workload, GONE.to_proto())
                for workload in self.workloads.of_worker(worker_id)
                if workload.workload_id not in reported_ids and not self._is_being_started(workload)
            ]
        return changed

    def _is_name_elsewhere(self, name: str, worker_id: str) -> bool:
        return any(one.worker_id != worker_id for one in self.workloads.named(name))

    def _is_being_started(self, workload: Workload) -> bool:
        return any(
            creates_workload(stored.command.operation)
            for stored in self.ledger.of_workload(workload.workload_id)
        )

    async def save_workload(self, workload: Workload) -> None:
        """Updates a workload in memory, stores it, and then publishes it."""
        await self.save_workloads([workload])

    async def save_workloads(
        self,
        workloads: Sequence[Workload],
        commands: Sequence[StoredCommand] = (),
        rows: Sequence[Change] = (),
        worker_name: str = "",
    ) -> None:
        """Updates workloads in memory, stores all arguments in one write, then publishes the changes.

        Args:
            workloads: The new states of workloads.
            commands: The new states of commands.
            rows: Other rows to store.
            worker_name: The name of the commands' worker, if the registry has forgotten the worker.
        """
        if not workloads and not commands and not rows:
            return
        before = {one.workload_id: self.workloads.pop(one.workload_id, None) for one in workloads}
        live = {one.workload_id: one for one in workloads if not is_ended(one.status.state)}
        self.workloads.update(live)
        events = []
        for workload in workloads:
            earlier = before[workload.workload_id]
            if earlier is None or _condition(earlier) != _condition(workload):
                events.append(event_row(self.events.of_workload(workload)))
        for stored in commands:
            event = self._event_of(stored.command, workloads, worker_name)
            if event is not None:
                events.append(event_row(event))
        try:
            await self.store.write(*rows, *map(workload_row, workloads), *map(command_row, commands), *events)
        except FleetError:  # undone unless a newer report was applied, so that a repeated report is new again
            for workload_id, earlier in before.items():
                if self.workloads.get(workload_id) is live.get(workload_id):
                    self.workloads.pop(workload_id, None)
                    if earlier is not None:
                        self.workloads[workload_id] = earlier
            raise
        for workload in workloads:
            self.workload_hub.publish(workload.workload_id, self.view(workload))
        for stored in commands:
            self.ledger.kept(stored)
            if is_terminal(stored.command.state):
                self._recent.add(stored.command)
            self.command_hub.publish(stored.command.command_id, stored.command)

    def _event_of(self, command: Command, workloads: Sequence[Workload], worker_name: str) -> Event | None:
        saved = (one for one in workloads if one.workload_id == command.workload_id)
        workload = self.workloads.get(command.workload_id) or next(saved, None)
        known = self.registry.get(command.worker_id)
        return self.events.of_command(
            command,
            workload_name=workload.name if workload else command.workload_id,
            worker_name=known.hello.name if known else worker_name or command.worker_id,
        )

    async def find_command(self, command_id: str) -> Command | None:
        """The command with this id as last stored. A step that is not on disk yet is not shown."""
        stored = self.ledger.on_disk.get(command_id)
        found = stored.command if stored is not None else self._recent.get(command_id)
        return found if found is not None else await self.store.find_command(command_id)

    async def save_command(
        self, stored: StoredCommand, rows: Sequence[Change] = (), workloads: Sequence[Workload] = ()
    ) -> None:
        """Stores a command together with workloads and other rows, and then publishes the changes.

        If the command failed to create its workload, the same write makes the workload FAILED.
        """
        command = stored.command
        changed = {one.workload_id: one for one in workloads}
        workload = changed.get(command.workload_id) or self.workloads.get(command.workload_id)
        failed = is_terminal(command.state) and command.state != SUCCEEDED
        if workload is None or is_ended(workload.status.state):
            failed = False
        elif failed and is_concluded(command.error):  # the workload may run
            failed = workload.status.state == workload_pb2.WORKLOAD_STATE_PENDING
        if workload is not None and failed and creates_workload(command.operation):
            changed[workload.workload_id] = _failed(workload, command.error)
        await self.save_workloads([*changed.values()], [stored], rows)

    async def forget_worker(self, known: KnownWorker) -> list[str]:
        """Forgets a worker that is not connected. One write makes its workloads and commands FAILED.

        If the worker connects again, it counts as a new worker, and reports its live workloads again.

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
        forgotten = FORGOTTEN.to_proto()
        workloads = [_failed(workload, forgotten) for workload in self.workloads.of_worker(worker_id)]
        steps = self.ledger.forget_worker(worker_id, FORGOTTEN, now_timestamp())
        self.registry.forget(known)
        try:
            await self.save_workloads(
                workloads,
                [step.after for step in steps],
                [Gone(schema.workers, worker_id)],
                worker_name=known.hello.name,
            )
        except FleetError:
            if self.registry.get(worker_id) is None:
                self.registry.add(known)
            for step in reversed(steps):
                self.ledger.revert(step)
            raise
        self._published_states.pop(worker_id, None)
        self._published_hellos.pop(worker_id, None)
        self._told_conditions.pop(worker_id, None)
        self.events.forgotten(known)
        self.fleet_hub.start_over(f"worker {known.hello.name} was forgotten")
        return [workload.workload_id for workload in workloads]


def _gpu_uuids(hello: Hello) -> set[str]:
    return {gpu.uuid for gpu in hello.gpus}


def _condition(workload: Workload) -> tuple[int, bool]:
    """The parts of a workload whose change is an event: its state and its readiness."""
    return workload.status.state, workload.status.HasField("ready_time")


def _failed(workload: Workload, error: errors_pb2.Error) -> Workload:
    """A copy of a workload that fails now."""
    failed = Workload()
    failed.CopyFrom(workload)
    failed.status.state = workload_pb2.WORKLOAD_STATE_FAILED
    failed.status.generation += 1
    failed.status.error.CopyFrom(error)
    failed.status.end_time.CopyFrom(now_timestamp())
    failed.status.ClearField("lease")
    return failed
