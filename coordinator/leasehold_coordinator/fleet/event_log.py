"""What has happened, for people and audits.

An event of a command or a workload is stored together with that change. Others are collected in memory, and
stored a little later, all at once. Nothing depends on them: where the store refuses, or a crash comes first,
some are missing.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from typing import Final, final

from leasehold.v1 import command_pb2, event_pb2, worker_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.event_pb2 import Event, EventKind
from leasehold.v1.event_service_pb2 import WatchEventsResponse
from leasehold.v1.worker_pb2 import WorkerState
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.command_states import is_terminal
from leasehold_coordinator.core.gpu_conditions import ConditionChange
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.workload_states import RUNNING, state_name
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.change_hub import Hub
from leasehold_coordinator.storage.rows import event_row
from leasehold_coordinator.storage.schema import event_id_at
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import now_timestamp

logger = logging.getLogger(__name__)

WAITING_LIMIT: Final = 4_096
"""Events that may wait for the store; beyond that the oldest are dropped."""

_OF_WORKERS: Final = {
    worker_pb2.WORKER_STATE_CONNECTED: (event_pb2.EVENT_KIND_WORKER_CONNECTED, "is in contact"),
    worker_pb2.WORKER_STATE_STALE: (event_pb2.EVENT_KIND_WORKER_STALE, "is silent"),
    worker_pb2.WORKER_STATE_LOST: (event_pb2.EVENT_KIND_WORKER_LOST, "is lost, and keeps what it leases"),
    worker_pb2.WORKER_STATE_DISCONNECTED: (event_pb2.EVENT_KIND_WORKER_LEFT, "has left"),
}


@final
class Events:
    """The events of one coordinator.

    Args:
        store: The store.
        hub: For watchers of events.
    """

    def __init__(self, store: Store, hub: Hub[WatchEventsResponse]) -> None:
        self._store = store
        self._hub = hub
        self._waiting: deque[Event] = deque(maxlen=WAITING_LIMIT)
        self._numbers = itertools.count()
        self._flushing = asyncio.Lock()

    def worker(self, known: KnownWorker, state: WorkerState.ValueType) -> None:
        """A worker is in another state."""
        if state in _OF_WORKERS:
            kind, what = _OF_WORKERS[state]
            self._add(kind, f"worker {known.hello.name} {what}", known.hello.worker_id, known.hello.name)

    def worker_deleted(self, known: KnownWorker) -> None:
        """An operator deleted the record of a worker."""
        kind = event_pb2.EVENT_KIND_WORKER_DELETED
        self._add(kind, f"worker {known.hello.name} was deleted", known.hello.worker_id, known.hello.name)

    def workload_deleted(self, workload: Workload) -> Event:
        """Somebody deleted the record of a workload. Its event is stored together with that."""
        event = self._event(
            event_pb2.EVENT_KIND_WORKLOAD_DELETED,
            f"workload {workload.name} was deleted",
            workload.worker_id,
        )
        event.workload_id, event.workload_name = workload.workload_id, workload.name
        return event

    def refused(self, error: FleetError, worker_id: str = "", worker_name: str = "") -> None:
        """A worker was not let in."""
        self._add(event_pb2.EVENT_KIND_WORKER_REFUSED, error.message, worker_id, worker_name)

    def refusals_left_out(self, message: str) -> None:
        """More workers were refused than are told one by one."""
        self._add(event_pb2.EVENT_KIND_WORKER_REFUSED, message)

    def protocol_error(self, error: FleetError, worker_id: str, worker_name: str) -> None:
        """A worker's session was ended, since it broke the protocol."""
        self._add(event_pb2.EVENT_KIND_PROTOCOL_ERROR, error.message, worker_id, worker_name)

    def of_workload(self, workload: Workload) -> Event:
        """A workload is in another state, or has become ready. Its event is stored together with it."""
        status = workload.status
        ready = " and ready" if status.state == RUNNING and status.HasField("ready_time") else ""
        event = self._event(
            event_pb2.EVENT_KIND_WORKLOAD_CHANGED,
            f"workload {workload.name} is {state_name(status.state)}{ready}",
            workload.worker_id,
        )
        event.workload_id, event.workload_name = workload.workload_id, workload.name
        return event

    def condition(
        self,
        known: KnownWorker,
        change: ConditionChange,
        slot: int | None = None,
        holder: Workload | None = None,
    ) -> None:
        """Something is known against a worker or a GPU of it, or no longer is.

        Args:
            known: The worker.
            change: What has changed.
            slot: The GPU's. None: it is about the worker.
            holder: The workload that has the GPU. None: none does.
        """
        worker_id, name = known.hello.worker_id, known.hello.name
        what = f"worker {name}" if slot is None else f"GPU {name}/{slot}"
        held = f"; workload {holder.name} has it" if holder is not None else ""
        event = self._add(change.kind, f"{what} {change.message}{held}", worker_id, name)
        if holder is not None:
            event.workload_id, event.workload_name = holder.workload_id, holder.name

    def of_command(self, command: Command, *, workload_name: str, worker_name: str) -> Event | None:
        """A command was created, has ended, or can't be asked for. Its event is stored together with it.

        Returns:
            None: no event, since the command has only taken a step.
        """
        if command.revision == 1:
            kind = event_pb2.EVENT_KIND_COMMAND_CREATED
        elif is_terminal(command.state):
            kind = event_pb2.EVENT_KIND_COMMAND_ENDED
        elif command.state == command_pb2.COMMAND_STATE_UNKNOWN:
            kind = event_pb2.EVENT_KIND_COMMAND_UNKNOWN
        else:
            return None
        operation = (command.operation.WhichOneof("kind") or "operation").replace("_", " ")
        of_what = workload_name if command.workload_id else f"worker {worker_name}"
        state = CommandState.Name(command.state).removeprefix("COMMAND_STATE_")
        why = f": {command.error.message}" if command.HasField("error") else ""
        event = self._event(kind, f"{operation} of {of_what} is {state}{why}", command.worker_id, worker_name)
        event.workload_id, event.workload_name = command.workload_id, workload_name
        event.command_id = command.command_id
        return event

    def _add(
        self, kind: EventKind.ValueType, message: str, worker_id: str = "", worker_name: str = ""
    ) -> Event:
        event = self._event(kind, message, worker_id, worker_name)
        self._waiting.append(event)
        return event

    def _event(
        self, kind: EventKind.ValueType, message: str, worker_id: str = "", worker_name: str = ""
    ) -> Event:
        return Event(
            event_id=f"{event_id_at(time.time_ns())}-{next(self._numbers) % 10_000:04d}",
            time=now_timestamp(),
            kind=kind,
            worker_id=worker_id,
            worker_name=worker_name,
            message=message,
        )

    def publish(self, event: Event) -> None:
        """Tells watchers of an event that is stored."""
        self._hub.publish(event.event_id, WatchEventsResponse(event=event))

    async def flush(self) -> None:
        """Stores what has been collected. After it, all that happened before it can be listed.

        Raises:
            FleetError: STORAGE_UNAVAILABLE; it is tried again with the next.
        """
        async with self._flushing:
            batch = list(self._waiting)
            if not batch:
                return
            self._waiting.clear()
            try:
                await self._store.write(*map(event_row, batch))
                for event in batch:
                    self.publish(event)
            except (FleetError, asyncio.CancelledError):  # an event that is written twice is there once
                later = list(self._waiting)
                self._waiting.clear()
                self._waiting.extend([*batch, *later])
                raise
