"""The coordinator's view of the fleet: workers, workloads and open commands, in memory and in the store.

What has not ended is held in memory and written through; what has ended is read from the store. Everything
here runs on the event loop's thread, and no state changes across an await but by design.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final, final

from leasehold.v1 import errors_pb2, fleet_pb2, worker_session_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.fleet_pb2 import FleetGpu, Worker, WorkerState
from leasehold.v1.worker_session_pb2 import Hello
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator import schema
from leasehold_coordinator.clock import is_storable, now_timestamp
from leasehold_coordinator.command_ledger import CommandLedger, StoredCommand
from leasehold_coordinator.command_states import SUCCEEDED, is_terminal
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.events import Events
from leasehold_coordinator.gpu_conditions import Conditions, changes
from leasehold_coordinator.operations import creates_workload
from leasehold_coordinator.registration import registered, reported_again
from leasehold_coordinator.registry import KnownWorker, Registry
from leasehold_coordinator.sessions import Session
from leasehold_coordinator.store import OldRows, Row, Store, command_row, worker_row, workload_row
from leasehold_coordinator.watch import Hub
from leasehold_coordinator.workload_states import is_ended

logger = logging.getLogger(__name__)

GONE: Final = FleetError(
    errors_pb2.ERROR_REASON_INTERRUPTED,
    "its worker restarted and does not have it any more: run it again",
)


NAMED_LIMIT: Final = 8
"""Ids that a refusal lists."""

SILENT: Final = (fleet_pb2.WORKER_STATE_STALE, fleet_pb2.WORKER_STATE_LOST)


@final
class Fleet:
    """The state that sessions, dispatch and the client API share."""

    def __init__(self, store: Store, load_interval_s: float) -> None:
        self.store = store
        self.registry = Registry(load_interval_s, time.monotonic())
        self.sessions: dict[str, Session] = {}
        """Live sessions by worker id."""
        self.workloads: dict[str, Workload] = {}
        """Workloads that have not ended, by id."""
        self.ledger = CommandLedger()
        """Commands that have not ended."""
        self.fleet_hub: Hub[Worker | FleetGpu] = Hub()
        self.workload_hub: Hub[Workload] = Hub()
        self.command_hub: Hub[Command] = Hub(history_bytes=0)
        """Nobody resumes: a watch of a command begins with how it stands."""
        self.events = Events(store)
        self._published_states: dict[str, WorkerState.ValueType] = {}
        self._published_gpus: dict[str, set[str]] = {}
        self._told_conditions: dict[str, Conditions] = {}
        """By worker. What is wrong when it first reports after our start is told, also if it was before."""

    async def load(self) -> None:
        """Brings back what the store holds."""
        for stored in await self.store.workers():
            self.registry.add_stored(stored.hello, stored.epoch)
        self.workloads = {workload.workload_id: workload for workload in await self.store.live_workloads()}
        self.ledger = CommandLedger(await self.store.open_commands())

    async def prune(self, retention_s: float) -> None:
        """Deletes some of the events, ended commands and ended workloads that were created that long ago."""
        before_ns = time.time_ns() - round(retention_s * 1e9)
        tables = (schema.commands, schema.workloads, schema.events)
        await self.store.write(*(OldRows(table, before_ns) for table in tables))

    def worker(self, known: KnownWorker) -> Worker:
        """A worker as clients see it."""
        return self.registry.worker(known, time.monotonic())

    def gpus(self, known: KnownWorker) -> list[FleetGpu]:
        """A worker's GPUs with the names of their holders."""
        found = list(self.registry.gpus(known))
        for gpu in found:
            holder = self.workloads.get(gpu.lease.workload_id)
            if holder is not None:
                gpu.workload_name = holder.name
        return found

    def publish_worker(self, known: KnownWorker) -> None:
        """Tells watchers of a worker and its GPUs."""
        worker, gpus = self.worker(known), self.gpus(known)
        uuids = {gpu.gpu.uuid for gpu in gpus}
        if self._published_gpus.get(worker.worker_id, set()) - uuids:
            self.fleet_hub.start_over(f"worker {worker.name} has fewer or other GPUs than before")
        self._published_gpus[worker.worker_id] = uuids
        if self._published_states.get(worker.worker_id) != worker.state:
            self.events.worker(known, worker.state)
        self._published_states[worker.worker_id] = worker.state
        self._tell_conditions(known)
        self.fleet_hub.publish(worker.worker_id, worker)
        for gpu in gpus:
            self.fleet_hub.publish(gpu.gpu.uuid, gpu)

    def _tell_conditions(self, known: KnownWorker) -> None:
        worker_id, now = known.hello.worker_id, known.conditions
        slots = {gpu.uuid: gpu.slot for gpu in known.hello.gpu_pool}
        for change in changes(self._told_conditions.get(worker_id, Conditions()), now):
            if change.gpu is None:
                self.events.condition(known, change)
                continue
            slot = slots.get(change.gpu.gpu_uuid, change.gpu.slot)
            self.events.condition(known, change, slot, self.workloads.get(change.gpu.workload_id))
        self._told_conditions[worker_id] = now

    def publish_silent_workers(self) -> None:
        """Tells watchers of workers whose state has changed by the passing of time."""
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
        """Ends the streams of workers that are lost: gRPC answers pings also for an agent that hangs.

        What such a worker may be doing is not known, which is told once it has no stream.
        """
        now = time.monotonic()
        for worker_id, session in self.sessions.items():
            known = self.registry.get(worker_id)
            if known is not None and self.registry.state(known, now) == fleet_pb2.WORKER_STATE_LOST:
                silent_s = now - known.last_seen
                session.end(
                    worker_session_pb2.GOODBYE_REASON_UNSPECIFIED,
                    FleetError(
                        errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
                        f"nothing came from worker {session.hello.name} for {silent_s:.0f} s: connect again",
                        worker=session.hello.name,
                    ),
                )

    def is_current(self, session: Session) -> bool:
        """Whether this is still its worker's session: it has neither ended nor been superseded."""
        return self.sessions.get(session.hello.worker_id) is session

    def is_in_contact(self, worker_id: str) -> bool:
        """Whether the worker has a session whose loads come in time."""
        known = self.registry.get(worker_id)
        return (
            known is not None
            and worker_id in self.sessions
            and self.registry.state(known, time.monotonic()) == fleet_pb2.WORKER_STATE_CONNECTED
        )

    def contact(self, worker_id: str) -> Session:
        """The session of a worker that is in contact.

        Raises:
            FleetError: WORKER_UNAVAILABLE.
        """
        if self.is_in_contact(worker_id):
            return self.sessions[worker_id]
        known = self.registry.get(worker_id)
        name = known.hello.name if known else worker_id
        state = fleet_pb2.WorkerState.Name(self.worker(known).state)[13:] if known else "unknown"
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            f"worker {name} is {state}: start it again, or wait until it is back",
            worker=name,
        )

    async def save_worker(self, hello: Hello, epoch: int) -> None:
        """Stores a worker's epoch and hello, before it is welcomed."""
        await self.store.write(worker_row(epoch, hello))

    async def find_workload(self, id_or_name: str) -> Workload:
        """The workload with this id, or the newest with this name.

        Raises:
            FleetError: UNKNOWN_WORKLOAD; also where several that have not ended have the name, since workers
                register what their own hosts call by it.
        """
        live = self.workloads.get(id_or_name)
        if live is None:
            named = [workload for workload in self.workloads.values() if workload.name == id_or_name]
            if len(named) > 1:
                ids = sorted(workload.workload_id for workload in named)
                raise FleetError(
                    errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
                    f"{len(named)} workloads that have not ended are named {id_or_name!r}: "
                    f"name one by its id, of {', '.join(ids[:NAMED_LIMIT])}",
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
        """Takes in a worker's report of a workload of its own, if it is newer than what is known.

        One whose session is over is dropped: the next hello tells it again.

        Raises:
            FleetError: PROTOCOL_VIOLATION, it has no id or an impossible time; STORAGE_UNAVAILABLE, nothing
                has changed.
        """
        if not reported.workload_id:
            raise FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, "a workload was reported without id")
        for moment in (reported.status.start_time, reported.create_time):
            if not is_storable(moment):
                raise FleetError(
                    errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
                    f"workload {reported.workload_id} has an impossible start time: send a true one",
                )
        worker_id = session.hello.worker_id
        if reported.workload_id not in self.workloads:
            ended = await self.store.find_workload(reported.workload_id)
            if ended is not None:  # it has ended, and stays so
                return
        if not self.is_current(session):
            return
        known = self.workloads.get(reported.workload_id)
        if known is None:
            workload = registered(reported, worker_id, now_timestamp())
        elif known.worker_id != worker_id:
            logger.warning("worker %s reported %s, which is another's", worker_id, known.name)
            return
        elif reported.status.generation <= known.status.generation:
            return
        else:
            workload = reported_again(known, reported)
        await self.save_workload(workload)

    async def save_workload(self, workload: Workload, *rows: Row) -> None:
        """Keeps a workload as it is now, stores it together with other rows, and then tells watchers."""
        before = self.workloads.pop(workload.workload_id, None)
        now = None if is_ended(workload.status.state) else workload
        if now is not None:
            self.workloads[workload.workload_id] = now
        try:
            await self.store.write(*rows, workload_row(workload))
        except FleetError:  # it is reported again, and must be news again, unless a newer one was taken in
            if self.workloads.get(workload.workload_id) is now:
                self.workloads.pop(workload.workload_id, None)
                if before is not None:
                    self.workloads[workload.workload_id] = before
            raise
        self.workload_hub.publish(workload.workload_id, workload)
        if before is None or before.status.state != workload.status.state:
            self.events.workload(workload)

    async def fail_workload(self, workload: Workload, error: errors_pb2.Error, *rows: Row) -> None:
        """Ends a workload that its worker did not start, or no longer has, and stores other rows with it."""
        failed = Workload()
        failed.CopyFrom(workload)
        failed.status.state = workload_pb2.WORKLOAD_STATE_FAILED
        failed.status.generation += 1
        failed.status.error.CopyFrom(error)
        failed.status.end_time.CopyFrom(now_timestamp())
        failed.status.ClearField("lease")
        await self.save_workload(failed, *rows)

    async def find_command(self, command_id: str) -> Command | None:
        """The command with this id as it is on disk: a step that is only under way is told to nobody."""
        stored = self.ledger.on_disk.get(command_id)
        return stored.command if stored is not None else await self.store.find_command(command_id)

    async def save_command(self, stored: StoredCommand, rows: Sequence[Row] = ()) -> None:
        """Stores a command as it is now, together with other rows, and then tells watchers.

        A workload that it was to create and did not is FAILED by the same write.
        """
        command = stored.command
        workload = self.workloads.get(command.workload_id)
        failed = is_terminal(command.state) and command.state != SUCCEEDED
        if workload is not None and failed and creates_workload(command.operation):
            await self.fail_workload(workload, command.error, command_row(stored), *rows)
        else:
            await self.store.write(command_row(stored), *rows)
        self.ledger.kept(stored)
        self.command_hub.publish(command.command_id, command)
        known = self.registry.get(command.worker_id)
        self.events.command(
            command,
            workload_name=workload.name if workload else command.workload_id,
            worker_name=known.hello.name if known else command.worker_id,
        )

    def workloads_of(self, worker_id: str) -> list[Workload]:
        """Workloads of a worker that have not ended."""
        return [workload for workload in self.workloads.values() if workload.worker_id == worker_id]
