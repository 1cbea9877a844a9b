"""The spans of parked workloads: for each GPU that a workload held before, the time until its next lease."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.lease_pb2 import LeaseSpan
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads
from leasehold_coordinator.fleet.span_queue import SpanQueue, new_span_id, told_time_ns
from leasehold_coordinator.storage.schema import PARKED_SPAN
from leasehold_coordinator.timestamps import timestamp

OPEN_LIMIT: Final = 4_096
"""Most open parked spans of one worker. A worker may report 2,048 workloads, each with all its GPUs."""


@final
class ParkedSpans:
    """The open spans of parked workloads.

    A worker keeps the ``park_time`` of a workload until the restore, so another one is another parked time.

    Args:
        queue: The changed spans.
        workloads: The workloads that have not ended.
        registry: The workers, for the GPUs of parked workloads.
    """

    def __init__(self, queue: SpanQueue, workloads: LiveWorkloads, registry: Registry) -> None:
        self._queue = queue
        self._workloads = workloads
        self._registry = registry
        self._open: dict[str, list[LeaseSpan]] = {}
        """By id of the workload."""
        self._park_times: dict[str, Timestamp] = {}
        """The worker's ``park_time`` of the open spans, by id of the workload."""
        self._counts: Counter[str] = Counter()
        """Number of open spans, by id of the worker."""
        self._refused: dict[str, dict[str, None]] = {}
        """Ids of the workloads whose spans were too many, the oldest first, by id of the worker."""

    def load(self, spans: Iterable[LeaseSpan], ended: Mapping[str, Workload]) -> None:
        """Takes the open spans of the store, and ends those of workloads that have ended.

        Args:
            spans: The spans.
            ended: The workloads of the spans that have ended, by id, as far as their records are known.
        """
        for span in spans:
            self._open.setdefault(span.workload_id, []).append(span)
            self._counts[span.worker_id] += 1
        for workload_id in [*self._open]:
            workload = self._workloads.get(workload_id)
            if workload is None:
                over = ended.get(workload_id)
                self.end(workload_id, told_time_ns(over.status.end_time if over is not None else None))
            elif workload.status.HasField("park_time"):
                self._park_times[workload_id] = workload.status.park_time

    def compare(self, workload: Workload, time_ns: int, *, is_held: bool) -> None:
        """Begins or ends the spans of a workload that has not ended.

        The reports of a workload and of its GPUs come one after the other, so between them nothing changes.

        Args:
            workload: The workload.
            time_ns: The time of the change.
            is_held: Whether the workload has an open span of a lease.
        """
        workload_id, status = workload.workload_id, workload.status
        if status.HasField("lease") and not is_held:
            return
        if is_held or not status.HasField("park_time"):
            self.end(workload_id, time_ns)
        elif self._park_times.get(workload_id) != status.park_time:
            self.end(workload_id, time_ns)
            self._begin(workload, time_ns)

    def end(self, workload_id: str, time_ns: int) -> None:
        """Ends the spans of a workload."""
        self._park_times.pop(workload_id, None)
        for span in self._open.pop(workload_id, ()):
            self._counts[span.worker_id] -= 1
            self._queue.end(span, time_ns)

    def next_refused(self, worker_id: str) -> Workload | None:
        """The next workload of a worker whose spans were too many. It is compared again."""
        refused = self._refused.get(worker_id)
        if not refused:
            return None
        workload_id = next(iter(refused))
        del refused[workload_id]
        return self._workloads.get(workload_id)

    def forget(self, worker_id: str) -> None:
        """Ends the spans of a deleted worker."""
        gone = [key for key, spans in self._open.items() if any(one.worker_id == worker_id for one in spans)]
        for workload_id in gone:
            self.end(workload_id, time.time_ns())
        self._refused.pop(worker_id, None)
        del self._counts[worker_id]

    def _begin(self, workload: Workload, time_ns: int) -> None:
        known = self._registry.get(workload.worker_id)
        former = set(workload.status.parked_gpu_uuids)
        gpus = [gpu for gpu in known.hello.gpus if gpu.uuid in former] if known is not None else []
        if known is None or not gpus:
            return
        worker_id, workload_id = workload.worker_id, workload.workload_id
        is_many = self._counts[worker_id] + len(gpus) > OPEN_LIMIT
        if is_many or not self._queue.admits(worker_id, len(gpus)):
            self._refused.setdefault(worker_id, {})[workload_id] = None
            return
        for gpu in gpus:
            span = LeaseSpan(
                span_id=new_span_id(PARKED_SPAN, time_ns),
                gpu_uuid=gpu.uuid,
                worker_id=worker_id,
                worker_name=known.hello.name,
                slot=gpu.slot,
                workload_id=workload_id,
                workload_name=workload.name,
                owner=workload.owner,
                begin_time=timestamp(time_ns),
                parked=True,
            )
            self._open.setdefault(workload_id, []).append(span)
            self._queue.put(span)
        self._counts[worker_id] += len(gpus)
        self._park_times[workload_id] = workload.status.park_time
