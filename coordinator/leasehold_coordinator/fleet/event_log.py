"""The log of events, for people and audits.

An event of a command or a workload is stored in the same write as its change. Other events are collected in
memory and stored together a little later. Nothing depends on them: a crash or a full queue loses some.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, final

from leasehold.v1 import command_pb2, errors_pb2, event_pb2, worker_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.event_pb2 import Event, EventKind
from leasehold.v1.event_service_pb2 import WatchEventsResponse
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.worker_pb2 import WorkerState
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.core.command_states import is_terminal
from leasehold_coordinator.core.gpu_conditions import ConditionChange
from leasehold_coordinator.core.gpu_texts import listed
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.owner_views import acting
from leasehold_coordinator.core.workload_states import RUNNING, state_name
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import caller
from leasehold_coordinator.fleet.change_hub import Hub
from leasehold_coordinator.fleet.event_bounds import EventBounds
from leasehold_coordinator.storage.rows import event_row
from leasehold_coordinator.storage.schema import event_id_at
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import timestamp

logger = logging.getLogger(__name__)

WAITING_LIMIT: Final = 4_096
"""Most events that may wait for the store. Beyond the limit, the oldest are dropped."""

WORKLOAD_EVENTS_PER_S: Final = 1.0
WORKLOAD_EVENT_BURST: Final = 8_192
"""Most events of the workloads of one worker, in the long run and at once: four changes of 2,048 workloads. A
worker may report 200 changes per second, which fill the history of 8 GiB within days."""

MESSAGE_LIMIT: Final = 1_024
"""Most characters of an event's message. Workers write parts of messages, such as the error of a command."""

_OF_WORKERS: Final = {
    worker_pb2.WORKER_STATE_CONNECTED: (event_pb2.EVENT_KIND_WORKER_CONNECTED, "is in contact"),
    worker_pb2.WORKER_STATE_STALE: (event_pb2.EVENT_KIND_WORKER_STALE, "is silent"),
    worker_pb2.WORKER_STATE_LOST: (event_pb2.EVENT_KIND_WORKER_LOST, "is lost; its leases stay"),
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
        self._of_workloads = EventBounds("workloads", WORKLOAD_EVENTS_PER_S, WORKLOAD_EVENT_BURST)
        self._waiting: deque[Event] = deque(maxlen=WAITING_LIMIT)
        self._numbers = itertools.count()
        self._flushing = asyncio.Lock()

    def worker(self, known: KnownWorker, state: WorkerState.ValueType, left_out: str = "") -> None:
        """Adds an event: the state of a worker's contact changed.

        Args:
            known: The worker.
            state: The state.
            left_out: The end of the message, about earlier changes without an event.
        """
        if state in _OF_WORKERS:
            kind, what = _OF_WORKERS[state]
            message = f"worker {known.hello.name} {what}{left_out}"
            self._add(kind, message, known.hello.worker_id, known.hello.name)

    def clock_jumped(self, message: str) -> None:
        """Adds an event: the clock of the coordinator's host jumped."""
        self._add(event_pb2.EVENT_KIND_CLOCK_JUMPED, message)

    def worker_deleted(self, known: KnownWorker) -> None:
        """Adds an event: an operator deleted the record of a worker."""
        self._of_workloads.forget(known.hello.worker_id)
        kind = event_pb2.EVENT_KIND_WORKER_DELETED
        self._add(kind, f"worker {known.hello.name} was deleted", known.hello.worker_id, known.hello.name)

    def workload_deleted(self, workload: Workload) -> Event:
        """Builds the event of a deleted record of a workload. The caller stores both in one write."""
        event = self._event(
            event_pb2.EVENT_KIND_WORKLOAD_DELETED,
            f"workload {workload.name} was deleted",
            workload.worker_id,
        )
        _name_workload(event, workload)
        return event

    def refused(self, error: FleetError, worker_id: str = "", worker_name: str = "") -> None:
        """Adds an event: a worker was refused."""
        self._add(event_pb2.EVENT_KIND_WORKER_REFUSED, error.message, worker_id, worker_name)

    def refusals_left_out(self, message: str) -> None:
        """Adds an event with the number of refusals above the limit, which have no events of their own."""
        self._add(event_pb2.EVENT_KIND_WORKER_REFUSED, message)

    def protocol_error(self, error: FleetError, worker_id: str, worker_name: str) -> None:
        """Adds an event: a worker violated the protocol, which ended its session."""
        self._add(event_pb2.EVENT_KIND_PROTOCOL_ERROR, error.message, worker_id, worker_name)

    def joined(self, identity: Identity, join_token_id: str, worker_id: str) -> Event:
        """Builds the event of a first certificate. The caller stores both in one write."""
        name = identity.name if identity.kind is Kind.WORKER else ""
        message = f"{identity} joined by the token {join_token_id}"
        return self._event(event_pb2.EVENT_KIND_JOINED, message, worker_id if name else "", name)

    def join_refused(self, identity: str, error: FleetError) -> None:
        """Adds an event: the first or the next certificate was refused to somebody."""
        self._add(event_pb2.EVENT_KIND_JOIN_REFUSED, f"{identity!r} got no certificate: {error.message}")

    def of_workload(self, workload: Workload, command_id: str = "") -> Event | None:
        """The event of a workload that changed its state or became ready. The caller stores both together.

        Args:
            workload: The workload.
            command_id: The command of another workload that changed the state. Empty: none.

        Returns:
            The event. None: the workloads of the worker change too often for an event of each.
        """
        left_out = self._of_workloads.admit(workload.worker_id)
        if left_out is None:
            return None
        status = workload.status
        ready = " and ready" if status.state == RUNNING and status.HasField("ready_time") else ""
        if status.state == RUNNING and status.error.reason == errors_pb2.ERROR_REASON_HOOK_FAILED:
            ready += ", but some of its hooks failed (HOOK_FAILED)"
        event = self._event(
            event_pb2.EVENT_KIND_WORKLOAD_CHANGED,
            f"workload {workload.name} is {state_name(status.state)}{ready}"
            f"{f', by command {command_id}' if command_id else ''}{left_out}",
            workload.worker_id,
        )
        event.command_id = command_id
        _name_workload(event, workload)
        return event

    def condition(
        self,
        known: KnownWorker,
        change: ConditionChange,
        slot: int | None = None,
        holder: Workload | None = None,
    ) -> None:
        """Adds an event: a condition of a worker or of its GPU changed.

        Args:
            known: The worker.
            change: The change.
            slot: The slot of the GPU. None: the change is about the worker.
            holder: The workload that leases the GPU. None: nobody leases the GPU.
        """
        worker_id, name = known.hello.worker_id, known.hello.name
        what = f"worker {name}" if slot is None else f"GPU {name}/{slot}"
        held = f"; workload {holder.name} has it" if holder is not None else ""
        event = self._add(change.kind, f"{what} {change.message}{held}", worker_id, name)
        if holder is not None:
            _name_workload(event, holder)

    def of_command(
        self, command: Command, *, workload_name: str, worker_name: str, slots: Mapping[str, int]
    ) -> Event | None:
        """The event of a command that was created, ended or became UNKNOWN. The caller stores both together.

        Args:
            command: The command.
            workload_name: The name of its workload.
            worker_name: The name of its worker.
            slots: The slots of the worker's GPUs by UUID.

        Returns:
            The event. None: other steps of a command have no event.
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
        if uuids := _gpu_targets(command.operation):
            places = [f"{worker_name}/{slots[uuid]}" if uuid in slots else uuid for uuid in uuids]
            of_what = listed(places, ", ")
        state = CommandState.Name(command.state).removeprefix("COMMAND_STATE_")
        why = f": {command.error.message}" if command.HasField("error") else ""
        event = self._event(kind, f"{operation} of {of_what} is {state}{why}", command.worker_id, worker_name)
        event.workload_id, event.workload_name = command.workload_id, workload_name
        event.command_id, event.actor = command.command_id, command.actor
        owners = list(command.owners) or [acting(command)]
        event.owner = owners[0] if len(owners) == 1 else ""
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
        now_ns = time.time_ns()
        if len(message) > MESSAGE_LIMIT:
            message = f"{message[: MESSAGE_LIMIT - 1]}…"
        return Event(
            event_id=f"{event_id_at(now_ns)}-{next(self._numbers) % 10_000:04d}",
            time=timestamp(now_ns),
            kind=kind,
            worker_id=worker_id,
            worker_name=worker_name,
            message=message,
            actor=caller(),
        )

    def publish(self, event: Event) -> None:
        """Tells watchers of an event that is stored."""
        self._hub.publish(event.event_id, WatchEventsResponse(event=event))

    async def flush(self) -> None:
        """Stores the collected events, so that a list shows all earlier events.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next flush tries again.
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
            except (FleetError, asyncio.CancelledError):  # a second write of an event has no effect
                later = list(self._waiting)
                self._waiting.clear()
                self._waiting.extend([*batch, *later])
                raise


def _gpu_targets(operation: Operation) -> Sequence[str]:
    """UUIDs of the GPUs that are the target of an operation. Empty: a workload or a whole worker is."""
    return operation.cordon.gpu_uuids or operation.uncordon.gpu_uuids or operation.reset_gpu_health.gpu_uuids


def _name_workload(event: Event, workload: Workload) -> None:
    """Names the workload of an event, with its owner."""
    event.workload_id, event.workload_name = workload.workload_id, workload.name
    event.owner = workload.owner
