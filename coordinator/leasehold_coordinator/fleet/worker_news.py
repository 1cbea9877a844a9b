"""Changes and events of workers and their GPUs."""

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Final, final

from leasehold.v1 import errors_pb2, worker_pb2
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.worker_pb2 import WorkerState
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.core.allowance import Allowance
from leasehold_coordinator.core.gpu_conditions import ConditionChange, Conditions, against, changes
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.worker_registry import LOST_MIN_S
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.event_log import Events
from leasehold_coordinator.fleet.fleet_reader import FleetReader

logger = logging.getLogger(__name__)

SILENT: Final = (worker_pb2.WORKER_STATE_STALE, worker_pb2.WORKER_STATE_LOST)

EVENTS_PER_S: Final = 0.2
EVENT_BURST: Final = 1_024
"""Most events of the conditions of one worker and its GPUs, in the long run and at once. A worker may report
256 GPUs 200 times per second, and the events of all workers share one history."""


@final
class WorkerNews:
    """Publishes workers and GPUs, and their deletions."""

    def __init__(self, reader: FleetReader, events: Events) -> None:
        self._reader = reader
        self._events = events
        self._published_states: dict[str, WorkerState.ValueType] = {}
        self._published_hellos: dict[str, Hello] = {}
        """The hello at the last publication, by worker id. Reveals removed GPUs."""
        self._told_conditions: dict[str, Conditions] = {}
        """The published conditions, by worker id. A restart of the coordinator publishes all again."""
        self._allowances: dict[str, Allowance] = {}
        """How many events of conditions a worker may still cause, by worker id."""
        self._left_out: Counter[str] = Counter()
        """Changes of conditions without an event, by worker id. The next event has their number."""

    def publish(self, known: KnownWorker) -> None:
        """Publishes a worker and its GPUs to watchers."""
        worker, gpus = self._reader.worker(known), self._reader.gpus(known)
        if known.reported:
            self._publish_gone_gpus(worker.worker_id, known.hello)
        if self._published_states.get(worker.worker_id) != worker.state:
            self._events.worker(known, worker.state)
        self._published_states[worker.worker_id] = worker.state
        self._tell_conditions(known)
        self._reader.fleet_hub.publish(worker.worker_id, WatchFleetResponse(worker=worker))
        for gpu in gpus:
            self._reader.fleet_hub.publish(gpu.gpu.uuid, WatchFleetResponse(gpu=gpu))

    def publish_deleted(self, known: KnownWorker) -> None:
        """Tells watchers and events of a worker that the registry does not have any more."""
        worker_id = known.hello.worker_id
        self._publish_gone_gpus(worker_id, Hello())
        self._published_hellos.pop(worker_id, None)
        self._published_states.pop(worker_id, None)
        self._told_conditions.pop(worker_id, None)
        self._allowances.pop(worker_id, None)
        self._left_out.pop(worker_id, None)
        self._events.worker_deleted(known)
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

    def _tell_conditions(self, known: KnownWorker) -> None:
        worker_id, now = known.hello.worker_id, known.conditions
        slots = {gpu.uuid: gpu.slot for gpu in known.hello.gpus}
        for found in changes(self._told_conditions.get(worker_id, Conditions()), now):
            if (change := self._within_allowance(worker_id, found)) is None:
                continue
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

    def _within_allowance(self, worker_id: str, change: ConditionChange) -> ConditionChange | None:
        """The change as its event tells it. None: the worker has caused too many events by now."""
        allowance = self._allowances.setdefault(worker_id, Allowance(EVENTS_PER_S, EVENT_BURST))
        if allowance.take(1, time.monotonic()):
            if not self._left_out[worker_id]:
                logger.warning("conditions of worker %s change too often for an event of each", worker_id)
            self._left_out[worker_id] += 1
            return None
        if not (left_out := self._left_out.pop(worker_id, 0)):
            return change
        return replace(change, message=f"{change.message}; {left_out} earlier changes have no event")

    def publish_silent_workers(self) -> None:
        """Publishes workers whose state has changed only by the passing of time."""
        now, registry = time.monotonic(), self._reader.registry
        for known in registry:
            worker_id, state = known.hello.worker_id, registry.state(known, now)
            if self._published_states.get(worker_id) != state:
                logger.info("worker %s is %s", known.hello.name, WorkerState.Name(state))
                self._published_states[worker_id] = state
                if state in SILENT:
                    registry.note_silence(known)
                self._events.worker(known, state)
                response = WatchFleetResponse(worker=self._reader.worker(known))
                self._reader.fleet_hub.publish(worker_id, response)

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
