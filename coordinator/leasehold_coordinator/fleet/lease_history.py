"""The history of leases: which workload used which GPU and when, and when a workload was parked.

The history also has the times in which a GPU was unavailable. Each publication of a worker is compared with
the open spans of its GPUs, and each change of a workload with its parked spans. Nothing depends on the
history. After a crash, the reports of the workers end and begin the spans that differ.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias, final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import lease_pb2
from leasehold.v1.lease_pb2 import GpuLease, LeaseSpan, SlotState
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads
from leasehold_coordinator.fleet.parked_spans import ParkedSpans
from leasehold_coordinator.fleet.span_queue import LastEnds, SpanQueue, new_span_id, told_time_ns
from leasehold_coordinator.storage.schema import USE_SPAN
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import timestamp

ID_LIMIT: Final = 256
"""Characters of an id in a span. A worker may report longer ids in a load."""

_NO_USE: Final = (lease_pb2.SLOT_STATE_UNSPECIFIED, lease_pb2.SLOT_STATE_FREE)

_Use: TypeAlias = "tuple[SlotState.ValueType, str, str]"
"""State of a slot, id of the lease, and id of the workload."""


@final
class LeaseHistory:
    """The open spans of all GPUs and parked workloads.

    Args:
        store: The store.
        workloads: The workloads that have not ended.
        registry: The workers.
    """

    def __init__(self, store: Store, workloads: LiveWorkloads, registry: Registry) -> None:
        self._workloads = workloads
        self._registry = registry
        self._queue = SpanQueue(store)
        self._last_ends = LastEnds()
        self._parked = ParkedSpans(self._queue, self._last_ends, workloads, registry)
        self._open: dict[str, dict[str, LeaseSpan]] = {}
        """Open spans by GPU, by id of the worker."""
        self._held: Counter[tuple[str, str]] = Counter()
        """GPUs with an open span of a lease, by ids of worker and workload."""
        self._sessions: dict[str, str | None] = {}
        """The session of the last comparison, by id of the worker."""
        self._first_ns: dict[str, int] = {}
        """When an unknown worker came, by its id. A deleted worker that returns has older spans."""
        self._left_out: dict[str, None] = {}
        """Ids of the workers with a change that has no span yet, the oldest first."""

    def load(
        self,
        spans: Iterable[LeaseSpan],
        ended: Mapping[str, Workload],
        last_ends_ns: Mapping[str, int],
    ) -> None:
        """Takes the open spans of the store. A later span of a GPU ends an earlier one.

        Args:
            spans: The spans, oldest first.
            ended: The workloads of parked spans that have ended, by id, as far as their records are known.
            last_ends_ns: The end of the last span of parked workloads without an open span, by id.
        """
        for workload_id, end_ns in last_ends_ns.items():
            self._last_ends.note(self._workloads[workload_id].worker_id, workload_id, end_ns)
        now_ns = time.time_ns()
        parked: list[LeaseSpan] = []
        for span in spans:
            if self._registry.get(span.worker_id) is None:  # it was deleted right before a crash
                self._queue.end(span, now_ns)
            elif span.parked:
                parked.append(span)
            else:
                of_worker = self._open.setdefault(span.worker_id, {})
                if (earlier := of_worker.get(span.gpu_uuid)) is not None:
                    self._end(earlier, span.begin_time.ToNanoseconds())
                of_worker[span.gpu_uuid] = span
                self._count_held(span, 1)
        self._parked.load(parked, ended)
        self._sessions = dict.fromkeys((known.hello.worker_id for known in self._registry), None)
        for workload in self._workloads.values():
            self._compare_parked(workload, self._park_ns(workload))

    def note(self, known: KnownWorker, gpus: Sequence[FleetGpu]) -> None:
        """Compares the reported GPUs of a worker with the open spans.

        A change within a session happened now. A change that the first report of a session shows happened
        before, at the time that the worker gives, if that is possible.

        Args:
            known: The worker. Its spans stay as they are until it has reported.
            gpus: Its GPUs.
        """
        worker_id, now_ns = known.hello.worker_id, time.time_ns()
        self._left_out.pop(worker_id, None)
        of_worker = self._open.setdefault(worker_id, {})
        changed: dict[str, int] = {}
        for uuid in of_worker.keys() - {gpu.gpu.uuid for gpu in gpus}:  # another worker may have it
            changed[of_worker[uuid].workload_id] = now_ns
            self._end(of_worker.pop(uuid), now_ns)
        if known.reported:
            changed |= self._note_gpus(known, gpus)
        for workload_id, time_ns in changed.items():
            workload = self._workloads.get(workload_id)
            if workload is not None and workload.worker_id == worker_id:
                self._compare_parked(workload, time_ns)
        self._note_refused(worker_id)

    def take_left_out(self, count: int) -> list[str]:
        """Ids of some workers with a change that has no span yet. They are to be compared again."""
        taken = list(islice(self._left_out, count))
        for worker_id in taken:
            del self._left_out[worker_id]
        return taken

    def note_workload(self, workload: Workload, *, was_away: bool = False) -> None:
        """Begins or ends the parked spans of a workload that has changed.

        Args:
            workload: The workload.
            was_away: Whether the change happened while the worker was away. Then its times count.
        """
        self._note_first(workload.worker_id)
        if is_ended(workload.status.state):
            end_time = workload.status.end_time if was_away and workload.status.HasField("end_time") else None
            self._parked.end(workload.workload_id, told_time_ns(end_time))
        else:
            self._compare_parked(workload, self._park_ns(workload) if was_away else time.time_ns())

    def note_undone(self, workload_ids: Iterable[str]) -> None:
        """Compares workloads whose last change the store refused."""
        for workload_id in workload_ids:
            if (workload := self._workloads.get(workload_id)) is not None:
                self.note_workload(workload)
            else:
                self._parked.end(workload_id, time.time_ns())

    def forget(self, worker_id: str) -> None:
        """Ends the spans of a deleted worker."""
        now_ns = time.time_ns()
        for span in self._open.pop(worker_id, {}).values():
            self._end(span, now_ns)
        self._parked.forget(worker_id)
        for by_worker in (self._sessions, self._first_ns, self._left_out):
            by_worker.pop(worker_id, None)
        self._queue.forget(worker_id)

    async def flush(self) -> None:
        """Stores the changed spans, as :meth:`SpanQueue.flush`."""
        await self._queue.flush()

    def _note_gpus(self, known: KnownWorker, gpus: Sequence[FleetGpu]) -> dict[str, int]:
        """Begins and ends the spans of reported GPUs. Returns the times of changes by id of the workload."""
        worker_id, now_ns = known.hello.worker_id, time.time_ns()
        self._note_first(worker_id)
        is_first = known.session_id not in (None, self._sessions[worker_id])
        self._sessions[worker_id] = known.session_id or self._sessions[worker_id]
        of_worker = self._open[worker_id]
        ends: dict[str, int] = {}
        begins: dict[str, int] = {}
        for gpu in gpus:
            uuid, span = gpu.gpu.uuid, of_worker.get(gpu.gpu.uuid)
            if (_NO_USE_KEY if span is None else _use_of_span(span)) == _use(gpu.lease):
                if span is not None:
                    self._name(span)
                continue
            if not self._queue.admits(worker_id):
                self._left_out[worker_id] = None
                continue
            earliest_ns = span.begin_time.ToNanoseconds() if span else self._earliest_ns(worker_id, uuid)
            time_ns = told_time_ns(_since(gpu.lease), earliest_ns) if is_first else now_ns
            if span is not None:
                end_ns = min(time_ns, self._given_up_ns(span)) if is_first else time_ns
                ends[span.workload_id] = max(end_ns, ends.get(span.workload_id, 0))
                self._end(of_worker.pop(uuid), end_ns)
            if gpu.lease.state not in _NO_USE:
                begun = of_worker[uuid] = self._begin(gpu, time_ns)
                begins[begun.workload_id] = min(time_ns, begins.get(begun.workload_id, time_ns))
        return ends | begins  # what was leased again is parked no longer, since its first lease began

    def _note_refused(self, worker_id: str) -> None:
        """Begins the parked spans that were too many, up to the first one that still is."""
        while (workload := self._parked.next_refused(worker_id)) is not None:
            self._compare_parked(workload, self._park_ns(workload))
            if self._parked.is_refused(workload):
                self._left_out[worker_id] = None
                return

    def _given_up_ns(self, span: LeaseSpan) -> int:
        """When a parked workload gave up a lease, as its worker tells. Now, if it is not parked."""
        workload = self._workloads.get(span.workload_id)
        is_own = workload is not None and workload.worker_id == span.worker_id
        return self._park_ns(workload) if workload is not None and is_own else time.time_ns()

    def _note_first(self, worker_id: str) -> None:
        if worker_id not in self._sessions:
            self._sessions[worker_id] = None
            self._first_ns[worker_id] = time.time_ns()

    def _earliest_ns(self, worker_id: str, uuid: str) -> int:
        """The earliest begin of the next span of a GPU without an open one."""
        return max(self._last_ends.of(worker_id, uuid), self._first_ns.get(worker_id, 0))

    def _park_ns(self, workload: Workload) -> int:
        """The time since which a workload is parked, as its worker tells. Now, if it tells none."""
        status = workload.status
        created_ns = workload.create_time.ToNanoseconds() if workload.HasField("create_time") else 0
        earliest_ns = max(created_ns, self._first_ns.get(workload.worker_id, 0))
        return told_time_ns(status.park_time if status.HasField("park_time") else None, earliest_ns)

    def _compare_parked(self, workload: Workload, time_ns: int) -> None:
        is_held = self._held[workload.worker_id, workload.workload_id] > 0
        self._parked.compare(workload, time_ns, is_held=is_held)
        if self._parked.is_refused(workload):
            self._left_out[workload.worker_id] = None

    def _begin(self, gpu: FleetGpu, time_ns: int) -> LeaseSpan:
        state, lease_id, workload_id = _use(gpu.lease)
        span = LeaseSpan(
            span_id=new_span_id(USE_SPAN, time_ns),
            gpu_uuid=gpu.gpu.uuid,
            worker_id=gpu.worker_id,
            worker_name=gpu.worker_name,
            slot=gpu.gpu.slot,
            state=state,
            lease_id=lease_id,
            workload_id=workload_id,
            begin_time=timestamp(time_ns),
        )
        self._count_held(span, 1)
        self._queue.put(span)
        self._name(span)
        return span

    def _count_held(self, span: LeaseSpan, change: int) -> None:
        if span.state == lease_pb2.SLOT_STATE_LEASED:
            holder = span.worker_id, span.workload_id
            self._held[holder] += change
            if not self._held[holder]:
                del self._held[holder]

    def _name(self, span: LeaseSpan) -> None:
        """Adds name and owner of the workload. A worker may report a lease before its workload."""
        workload = self._workloads.get(span.workload_id) if not span.workload_name else None
        if workload is not None and workload.worker_id == span.worker_id:
            span.workload_name, span.owner = workload.name, workload.owner
            self._queue.put(span)

    def _end(self, span: LeaseSpan, time_ns: int) -> None:
        self._count_held(span, -1)
        self._queue.end(span, time_ns)
        for key in (span.gpu_uuid, span.workload_id):
            self._last_ends.note(span.worker_id, key, span.end_time.ToNanoseconds())


def _use(lease: GpuLease) -> _Use:
    """The use that a lease entry shows."""
    if lease.state in _NO_USE:
        return _NO_USE_KEY
    return lease.state, lease.lease_id[:ID_LIMIT], lease.workload_id[:ID_LIMIT]


def _use_of_span(span: LeaseSpan) -> _Use:
    return span.state, span.lease_id, span.workload_id


_NO_USE_KEY: Final[_Use] = (lease_pb2.SLOT_STATE_FREE, "", "")


def _since(lease: GpuLease) -> Timestamp | None:
    """When a use began, as the worker tells."""
    return lease.since if lease.HasField("since") else None
