"""Changes and events of workers and their GPUs."""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final, final

from leasehold.v1 import errors_pb2, event_pb2, worker_pb2
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.worker_pb2 import WorkerState
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.core.gpu_conditions import Conditions, against, changes
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.worker_registry import LOST_MIN_S
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.event_bounds import EventBounds
from leasehold_coordinator.fleet.event_log import Events
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.lease_history import LeaseHistory

logger = logging.getLogger(__name__)

SILENT: Final = (worker_pb2.WORKER_STATE_STALE, worker_pb2.WORKER_STATE_LOST)

EVENTS_PER_S: Final = 0.2
EVENT_BURST: Final = 1_024
"""Most events of the conditions of one worker and its GPUs, in the long run and at once, and as many of its
connections. A worker may report 256 GPUs 200 times per second."""

LEFT_OUT_PER_TICK: Final = 100
"""Most workers that are compared again with the history of leases in one tick."""

WORKLOADS_PER_TICK: Final = 400
"""Most workloads that are published in one tick because the contact of their worker changed.

A watcher may fall 1,000 changes behind, and thousands of workers reconnect at once after a restart.
"""


BEFORE_START: Final = "; the condition may be older than the start of the coordinator"
"""End of the message about a condition that the first report after a start shows."""


@final
class WorkerNews:
    """Publishes workers and GPUs, their deletions, and workloads whose worker lost or regained contact."""

    def __init__(self, reader: FleetReader, events: Events, history: LeaseHistory) -> None:
        self._reader = reader
        self._events = events
        self._history = history
        self._published_states: dict[str, WorkerState.ValueType] = {}
        self._published_refusals: dict[str, str] = {}
        """Why workers are refused, as published, by worker id. Workers that are not refused are missing."""
        self._published_hellos: dict[str, Hello] = {}
        """The hello at the last publication, by worker id. Reveals removed GPUs."""
        self._told_conditions: dict[str, Conditions] = {}
        """The published conditions, by worker id."""
        self._unheard: set[str] = set()
        """Ids of the workers of the store that have not reported since the start."""
        self._conditions = EventBounds("conditions", EVENTS_PER_S, EVENT_BURST)
        self._contacts = EventBounds("connections", EVENTS_PER_S, EVENT_BURST)
        self._due_workloads: dict[str, None] = {}
        """Ids of the workloads that the next ticks publish, oldest first."""

    def load(self, worker_ids: Iterable[str]) -> None:
        """Takes the ids of the workers of the store."""
        self._unheard.update(worker_ids)

    def publish(self, known: KnownWorker) -> None:
        """Publishes a worker and its GPUs to watchers."""
        worker, gpus = self._reader.worker(known), self._reader.gpus(known)
        if known.reported:
            self._publish_gone_gpus(worker.worker_id, known.hello)
        if self._published_states.get(worker.worker_id) != worker.state:
            self._tell_contact(known, worker.state)
        self._note_state(worker.worker_id, worker.state)
        self._note_refusal(worker.worker_id, worker.refusal)
        self._tell_conditions(known)
        self._history.note(known, gpus)
        self._reader.fleet_hub.publish(worker.worker_id, WatchFleetResponse(worker=worker))
        for gpu in gpus:
            self._reader.fleet_hub.publish(gpu.gpu.uuid, WatchFleetResponse(gpu=gpu))

    def publish_deleted(self, known: KnownWorker) -> None:
        """Tells watchers and events of a worker that the registry does not have any more."""
        worker_id = known.hello.worker_id
        self._publish_gone_gpus(worker_id, Hello())
        self._published_hellos.pop(worker_id, None)
        self._published_states.pop(worker_id, None)
        self._published_refusals.pop(worker_id, None)
        self._told_conditions.pop(worker_id, None)
        self._unheard.discard(worker_id)
        self._conditions.forget(worker_id)
        self._contacts.forget(worker_id)
        self._events.worker_deleted(known)
        self._history.forget(worker_id)
        self._reader.fleet_hub.publish(worker_id, WatchFleetResponse(deleted_worker_id=worker_id))

    def _publish_gone_gpus(self, worker_id: str, hello: Hello) -> None:
        """Tells watchers of GPUs that a worker had and that no worker has any more."""
        before = self._published_hellos.get(worker_id)
        if before is hello:
            return
        self._published_hellos[worker_id] = hello
        if before is None:
            return
        left = {gpu.uuid for gpu in before.gpus} - {gpu.uuid for gpu in hello.gpus}
        for uuid in sorted(left):
            if self._reader.registry.owner(uuid) is None:
                self._reader.fleet_hub.publish(uuid, WatchFleetResponse(deleted_gpu_uuid=uuid))

    def _tell_contact(self, known: KnownWorker, state: WorkerState.ValueType) -> None:
        """Adds an event of a worker's contact, unless the worker connects and leaves all the time."""
        if (left_out := self._contacts.admit(known.hello.worker_id)) is not None:
            self._events.worker(known, state, left_out)

    def _tell_conditions(self, known: KnownWorker) -> None:
        worker_id, now = known.hello.worker_id, known.conditions
        slots = {gpu.uuid: gpu.slot for gpu in known.hello.gpus}
        is_first = worker_id in self._unheard
        if known.reported:
            self._unheard.discard(worker_id)
        for found in changes(self._told_conditions.get(worker_id, Conditions()), now):
            # A cordon is a command, which had its events.
            if is_first and found.kind == event_pb2.EVENT_KIND_CORDON:
                continue
            if (left_out := self._conditions.admit(worker_id)) is None:
                continue
            since = BEFORE_START if is_first else ""
            change = replace(found, message=found.message + since + left_out)
            if change.gpu is None:
                self._events.condition(known, change)
                continue
            slot = slots.get(change.gpu.gpu_uuid, change.gpu.slot)
            holder = self._reader.workloads.get(change.gpu.workload_id)
            is_own = holder is not None and holder.worker_id == worker_id
            self._events.condition(known, change, slot, holder if is_own else None)
        self._told_conditions.pop(worker_id, None)
        if (told := against(now)) is not None:
            self._told_conditions[worker_id] = told

    def _note_state(self, worker_id: str, state: WorkerState.ValueType) -> None:
        """Notes a published state. If the contact changed, the next ticks publish the worker's workloads.

        A worker without a published state counts as out of contact, as after a start of the coordinator.
        """
        connected = worker_pb2.WORKER_STATE_CONNECTED
        if (self._published_states.get(worker_id) == connected) != (state == connected):
            for workload in self._reader.workloads.of_worker(worker_id):
                self._due_workloads[workload.workload_id] = None
        self._published_states[worker_id] = state

    def publish_due_workloads(self) -> None:
        """Publishes workloads whose ``out_of_contact`` changed, at most :data:`WORKLOADS_PER_TICK`."""
        for workload_id in list(islice(self._due_workloads, WORKLOADS_PER_TICK)):
            del self._due_workloads[workload_id]
            workload = self._reader.workloads.on_disk(workload_id)
            if workload is not None:  # it has not ended meanwhile
                response = WatchWorkloadsResponse(workload=self._reader.view(workload))
                self._reader.workload_hub.publish(workload_id, response)

    def note_left_out_leases(self) -> None:
        """Compares workers that had too many changes with the history, at most :data:`LEFT_OUT_PER_TICK`."""
        for worker_id in self._history.take_left_out(LEFT_OUT_PER_TICK):
            if (known := self._reader.registry.get(worker_id)) is not None:
                self._history.note(known, self._reader.gpus(known))

    def publish_silent_workers(self) -> None:
        """Publishes workers that have changed without a report: by time, by a block or by its end."""
        now, registry = time.monotonic(), self._reader.registry
        for known in registry:
            worker_id, state = known.hello.worker_id, registry.state(known, now)
            if self._published_states.get(worker_id) != state:
                shown = WorkerState.Name(state).removeprefix("WORKER_STATE_")
                logger.info("worker %s is %s", known.hello.name, shown)
                self._note_state(worker_id, state)
                if state in SILENT:
                    registry.note_silence(known)
                if known.reported or not known.left:  # the event of an earlier run's goodbye is stored
                    self._events.worker(known, state)
            elif known.session_id is not None or not self._is_refused_anew(known):
                continue
            response = WatchFleetResponse(worker=self._reader.worker(known))
            self._reader.fleet_hub.publish(worker_id, response)

    def _is_refused_anew(self, known: KnownWorker) -> bool:
        """Whether a worker is refused for another reason than published, or not any more."""
        return self._note_refusal(known.hello.worker_id, self._reader.refusal(known))

    def _note_refusal(self, worker_id: str, refusal: str) -> bool:
        """Notes the published refusal of a worker. Returns whether it has changed."""
        has_changed = self._published_refusals.pop(worker_id, "") != refusal
        if refusal:
            self._published_refusals[worker_id] = refusal
        return has_changed

    def end_lost_sessions(self) -> None:
        """Ends the streams of LOST workers: gRPC answers pings also for an agent that hangs.

        Commands of a worker become UNKNOWN only once the worker has no stream.
        """
        now = time.monotonic()
        for session in self._reader.sessions.values():
            if (known := session.known) is None or now - known.last_seen < LOST_MIN_S:
                continue  # the common case: this runs twice per second for each worker
            if self._reader.registry.state(known, now) == worker_pb2.WORKER_STATE_LOST:
                silent_s = now - known.last_seen
                session.end(
                    session_pb2.GOODBYE_REASON_UNSPECIFIED,
                    FleetError(
                        errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
                        f"worker {session.hello.name} sent nothing for {silent_s:.0f} s: connect again",
                        worker=session.hello.name,
                    ),
                )
