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
from leasehold_coordinator.fleet.span_queue import LastEnds, SpanQueue, new_span_id, told_time_ns
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
        last_ends: The ends of spans.
        workloads: The workloads that have not ended.
        registry: The workers, for the GPUs of parked workloads.
    """

    def __init__(
        self, queue: SpanQueue, last_ends: LastEnds, workloads: LiveWorkloads, registry: Registry
    ) -> None:
        self._queue = queue
        self._last_ends = last_ends
        self._workloads = workloads
        self._registry = registry
        self._open: dict[str, list[LeaseSpan]] = {}
        """By id of the workload."""
        self._park_times: dict[str, Timestamp] = {}
        """The worker's ``park_time`` of the open spans, by id of the workload. A crash may lose it."""
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
                is_told = over is not None and over.status.HasField("end_time")
                self.end(workload_id, told_time_ns(over.status.end_time if over and is_told else None))
            elif workload.status.HasField("park_time"):
                self._park_times[workload_id] = workload.status.park_time

    def compare(self, workload: Workload, time_ns: int, *, is_held: bool) -> None:
        """Begins or ends the spans of a workload that has not ended.

        Args:
            workload: The workload.
            time_ns: The time of the change.
            is_held: Whether the workload has an open span of a lease.
        """
        workload_id, status = workload.workload_id, workload.status
        if status.HasField("lease") and not is_held:
            return  # its GPUs are reported soon, and the next lease ends the parked time
        if is_held or not status.HasField("park_time"):
            self.end(workload_id, time_ns)
            self._refused.get(workload.worker_id, {}).pop(workload_id, None)
        elif workload_id in self._open and workload_id not in self._park_times:
            self._park_times[workload_id] = status.park_time
        elif self._park_times.get(workload_id) != status.park_time:
            self.end(workload_id, time_ns)
            self._begin(workload, time_ns)

    def end(self, workload_id: str, time_ns: int) -> None:
        """Ends the spans of a workload."""
        self._park_times.pop(workload_id, None)
        for span in self._open.pop(workload_id, ()):
            self._counts[span.worker_id] -= 1
            self._queue.end(span, time_ns)
            self._last_ends.note(span.worker_id, workload_id, span.end_time.ToNanoseconds())

    def next_refused(self, worker_id: str) -> Workload | None:
        """The next workload of a worker whose spans were too many. None: there is none."""
        refused = self._refused.get(worker_id, {})
        while refused:
            workload_id = next(iter(refused))
            del refused[workload_id]
            if (workload := self._workloads.get(workload_id)) is not None:
                return workload
        self._refused.pop(worker_id, None)
        return None

    def is_refused(self, workload: Workload) -> bool:
        """Whether the spans of a workload were too many."""
        return workload.workload_id in self._refused.get(workload.worker_id, {})

    def forget(self, worker_id: str) -> None:
        """Ends the spans of a deleted worker."""
        gone = [key for key, spans in self._open.items() if any(one.worker_id == worker_id for one in spans)]
        for workload_id in gone:
            self.end(workload_id, time.time_ns())
        self._refused.pop(worker_id, None)
        del self._counts[worker_id]

    def _begin(self, workload: Workload, time_ns: int) -> None:
        worker_id, workload_id = workload.worker_id, workload.workload_id
        former = set(workload.status.parked_gpu_uuids)
        known = self._registry.get(worker_id)
        if known is None or not former:
            return
        is_many = self._counts[worker_id] + len(former) > OPEN_LIMIT
        if is_many or not self._queue.admits(worker_id, len(former)):
            self._refused.setdefault(worker_id, {})[workload_id] = None
            return
        begin_ns = max(time_ns, self._last_ends.of(worker_id, workload_id))
        for gpu in (one for one in known.hello.gpus if one.uuid in former):
            span = LeaseSpan(
                span_id=new_span_id(PARKED_SPAN, begin_ns),
                gpu_uuid=gpu.uuid,
                worker_id=worker_id,
                worker_name=known.hello.name,
                slot=gpu.slot,
                workload_id=workload_id,
                workload_name=workload.name,
                owner=workload.owner,
                begin_time=timestamp(begin_ns),
                parked=True,
            )
            self._open.setdefault(workload_id, []).append(span)
            self._counts[worker_id] += 1
            self._queue.put(span)
        self._park_times[workload_id] = workload.status.park_time
