"""The history of leases: which workload used which GPU and when, and when a workload was parked.

The history also has the times in which a GPU was unavailable. Each publication of a worker is compared with
the open spans of its GPUs, and each change of a workload with its parked spans. Changed spans are collected
in memory and stored together a little later. Nothing depends on them, and a crash loses those of half a
second: after a restart, the reports of the workers end and begin the spans that differ.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Final, Literal, TypeAlias, final

from leasehold.v1 import lease_pb2
from leasehold.v1.lease_pb2 import GpuLease, LeaseSpan, SlotState
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus

from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.event_bounds import EventBounds
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads
from leasehold_coordinator.storage.rows import lease_span_row
from leasehold_coordinator.storage.schema import PARKED_SPAN
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import is_storable, timestamp

WAITING_LIMIT: Final = 65_536
"""Most spans that may wait for the store. Further changes are noted once the store has answered."""

SPANS_PER_S: Final = 2.0
SPAN_BURST: Final = 8_192
"""Most spans of the GPUs of one worker, in the long run and at once. A worker may report 200 times per
second."""

DELETED_LIMIT: Final = 10_000
"""Most deleted workers whose deletion is remembered. Others may return with overlapping spans."""

ID_LIMIT: Final = 256
"""Characters of an id in a span. A worker may report longer ids in a load."""

_NO_USE: Final = (lease_pb2.SLOT_STATE_UNSPECIFIED, lease_pb2.SLOT_STATE_FREE)

_Use: TypeAlias = "tuple[SlotState.ValueType, str, str]"
"""State of a slot, id of the lease, and id of the workload."""


@final
class LeaseHistory:
    """The open spans of all GPUs and parked workloads, and the changed spans that are not stored yet.

    Args:
        store: The store.
        workloads: The workloads that have not ended.
        registry: The workers, for the GPUs of parked workloads.
    """

    def __init__(self, store: Store, workloads: LiveWorkloads, registry: Registry) -> None:
        self._store = store
        self._workloads = workloads
        self._registry = registry
        self._open: dict[str, dict[str, LeaseSpan]] = {}
        """Open spans by GPU, by id of the worker."""
        self._held: Counter[tuple[str, str]] = Counter()
        """GPUs with an open span of a lease, by ids of worker and workload."""
        self._parked: dict[str, list[LeaseSpan]] = {}
        """Open spans of parked workloads, by id of the workload."""
        self._deleted_ns: dict[str, int] = {}
        """When a worker was deleted, by its id, the oldest deletion first. Its spans ended then."""
        self._refused: dict[str, set[str]] = {}
        """Ids of the parked workloads whose spans were too many, by id of the worker."""
        self._sessions: dict[str, str | None] = {}
        """The session of the last comparison, by id of the worker."""
        self._waiting: dict[str, LeaseSpan] = {}
        """Changed spans by id. A later change of a span replaces an earlier one."""
        self._flushing = asyncio.Lock()
        self._bounds = EventBounds("leases", SPANS_PER_S, SPAN_BURST)

    def load(self, spans: Iterable[LeaseSpan]) -> None:
        """Takes the open spans of the store, oldest first. A later span of a GPU ends an earlier one."""
        for span in spans:
            if span.parked:
                self._parked.setdefault(span.workload_id, []).append(span)
                continue
            of_worker = self._open.setdefault(span.worker_id, {})
            if (earlier := of_worker.get(span.gpu_uuid)) is not None:
                self._end(earlier, span.begin_time.ToNanoseconds())
            of_worker[span.gpu_uuid] = span
            self._count_held(span, 1)
        now_ns = time.time_ns()
        for workload_id in self._parked.keys() - self._workloads.keys():
            self._end_parked(workload_id, now_ns)
        for workload in self._workloads.values():
            self._compare_parked(workload, _told_ns(workload.status, "park_time", now_ns))

    def note(self, known: KnownWorker, gpus: Sequence[FleetGpu]) -> None:
        """Compares the reported GPUs of a worker with the open spans.

        A change within a session happened now. A change that the first report of a session shows happened
        before, at the time that the worker gives, if that is possible.

        Args:
            known: The worker. Its spans stay as they are until it has reported.
            gpus: Its GPUs.
        """
        if not known.reported or len(self._waiting) >= WAITING_LIMIT:
            return
        worker_id, now_ns = known.hello.worker_id, time.time_ns()
        is_first = self._sessions.get(worker_id) != known.session_id
        self._sessions[worker_id] = known.session_id
        of_worker = self._open.setdefault(worker_id, {})
        ends: dict[str, int] = dict.fromkeys(self._refused.pop(worker_id, ()), 0)
        begins: dict[str, int] = {}
        for uuid in of_worker.keys() - {gpu.gpu.uuid for gpu in gpus}:
            ends[of_worker[uuid].workload_id] = now_ns
            self._end(of_worker.pop(uuid), now_ns)
        for gpu in gpus:
            span = of_worker.get(gpu.gpu.uuid)
            if (_NO_USE_KEY if span is None else _use_of_span(span)) == _use(gpu.lease):
                if span is not None:
                    self._name(span)
                continue
            if self._bounds.admit(worker_id) is None:
                continue  # compared again at the next publication
            earliest_ns = span.begin_time.ToNanoseconds() if span else self._deleted_ns.get(worker_id, 0)
            time_ns = _change_time_ns(gpu.lease, earliest_ns, now_ns) if is_first else now_ns
            if span is not None:
                ends[span.workload_id] = max(time_ns, ends.get(span.workload_id, 0))
                self._end(of_worker.pop(gpu.gpu.uuid), time_ns)
            if gpu.lease.state not in _NO_USE:
                begun = of_worker[gpu.gpu.uuid] = self._begin(gpu, time_ns)
                begins[begun.workload_id] = min(time_ns, begins.get(begun.workload_id, time_ns))
        for workload_id, time_ns in (ends | begins).items():
            if (workload := self._workloads.get(workload_id)) is not None:
                told_ns = time_ns or _told_ns(workload.status, "park_time", now_ns)
                self._compare_parked(workload, told_ns)

    def note_workload(self, workload: Workload, *, is_new: bool = False) -> None:
        """Begins or ends the parked spans of a workload that has changed.

        Args:
            workload: The workload.
            is_new: Whether it was unknown, or seemed to have ended: it was parked before.
        """
        now_ns = time.time_ns()
        if is_ended(workload.status.state):
            self._end_parked(workload.workload_id, _told_ns(workload.status, "end_time", now_ns))
        elif is_new:
            deleted_ns = self._deleted_ns.get(workload.worker_id, 0)
            told_ns = _told_ns(workload.status, "park_time", now_ns)
            self._compare_parked(workload, max(told_ns, deleted_ns))
        else:
            self._compare_parked(workload, now_ns)

    def forget(self, worker_id: str) -> None:
        """Ends the spans of a deleted worker."""
        now_ns = time.time_ns()
        self._deleted_ns.pop(worker_id, None)
        self._deleted_ns[worker_id] = now_ns
        if len(self._deleted_ns) > DELETED_LIMIT:
            del self._deleted_ns[next(iter(self._deleted_ns))]
        parked = [span for spans in self._parked.values() for span in spans if span.worker_id == worker_id]
        for span in [*self._open.pop(worker_id, {}).values(), *parked]:
            self._end(span, now_ns)
        for workload_id in {span.workload_id for span in parked}:
            del self._parked[workload_id]
        self._refused.pop(worker_id, None)
        self._sessions.pop(worker_id, None)
        self._bounds.forget(worker_id)

    async def flush(self) -> None:
        """Stores the changed spans, so that a list shows all earlier changes.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next flush tries again.
        """
        async with self._flushing:
            batch, self._waiting = self._waiting, {}
            if not batch:
                return
            try:
                await self._store.write(*map(lease_span_row, batch.values()))
            except (FleetError, asyncio.CancelledError):  # a second write of a span has no effect
                self._waiting = batch | self._waiting
                raise

    def _begin(self, gpu: FleetGpu, time_ns: int) -> LeaseSpan:
        state, lease_id, workload_id = _use(gpu.lease)
        span = LeaseSpan(
            span_id=_new_id("s-", time_ns),
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
        self._waiting[span.span_id] = span
        self._name(span)
        return span

    def _compare_parked(self, workload: Workload, time_ns: int) -> None:
        """Begins or ends the parked spans of a workload that has not ended.

        A parked time lasts from the end of a lease to the begin of the next one. The reports of a workload
        and of its GPUs come one after the other, so between them nothing changes.
        """
        workload_id, status = workload.workload_id, workload.status
        is_held = self._held[workload.worker_id, workload_id] > 0
        if status.HasField("lease") and not is_held:
            return
        former = set(status.parked_gpu_uuids) if status.HasField("park_time") and not is_held else set()
        if (spans := self._parked.get(workload_id)) is not None:
            if former.issuperset(span.gpu_uuid for span in spans):
                return
            self._end_parked(workload_id, time_ns)
            # The workload was restored and parked elsewhere while its worker was away.
            time_ns = _told_ns(status, "park_time", time_ns)
        if former:
            self._begin_parked(workload, former, time_ns)

    def _begin_parked(self, workload: Workload, former: Set[str], time_ns: int) -> None:
        known = self._registry.get(workload.worker_id)
        gpus = [gpu for gpu in known.hello.gpus if gpu.uuid in former] if known is not None else []
        if known is None or not gpus:
            return
        is_full = len(self._waiting) >= WAITING_LIMIT
        if is_full or self._bounds.admit(workload.worker_id, len(gpus)) is None:
            self._refused.setdefault(workload.worker_id, set()).add(workload.workload_id)
            return
        spans = [
            LeaseSpan(
                span_id=_new_id(PARKED_SPAN, time_ns),
                gpu_uuid=gpu.uuid,
                worker_id=workload.worker_id,
                worker_name=known.hello.name,
                slot=gpu.slot,
                workload_id=workload.workload_id,
                workload_name=workload.name,
                owner=workload.owner,
                begin_time=timestamp(time_ns),
                parked=True,
            )
            for gpu in gpus
        ]
        self._parked[workload.workload_id] = spans
        self._waiting.update((span.span_id, span) for span in spans)

    def _end_parked(self, workload_id: str, time_ns: int) -> None:
        for span in self._parked.pop(workload_id, ()):
            self._end(span, time_ns)

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
            self._waiting[span.span_id] = span

    def _end(self, span: LeaseSpan, time_ns: int) -> None:
        self._count_held(span, -1)
        span.end_time.CopyFrom(timestamp(max(time_ns, span.begin_time.ToNanoseconds())))
        self._waiting[span.span_id] = span


def _new_id(kind: str, time_ns: int) -> str:
    """An id by time. A worker may choose the time: the random part keeps it from the spans of others."""
    return f"{kind}{time_ns:019d}-{secrets.token_hex(8)}"


def _told_ns(status: WorkloadStatus, field: Literal["park_time", "end_time"], now_ns: int) -> int:
    """A time that the worker tells, if it is possible, or else now."""
    moment = status.park_time if field == "park_time" else status.end_time
    if not status.HasField(field) or not is_storable(moment):
        return now_ns
    return max(0, min(moment.ToNanoseconds(), now_ns))


def _use(lease: GpuLease) -> _Use:
    """The use that a lease entry shows."""
    if lease.state in _NO_USE:
        return _NO_USE_KEY
    return lease.state, lease.lease_id[:ID_LIMIT], lease.workload_id[:ID_LIMIT]


def _use_of_span(span: LeaseSpan) -> _Use:
    return span.state, span.lease_id, span.workload_id


_NO_USE_KEY: Final[_Use] = (lease_pb2.SLOT_STATE_FREE, "", "")


def _change_time_ns(lease: GpuLease, earliest_ns: int, now_ns: int) -> int:
    """When a use changed while the worker was out of contact. The worker's clock may be wrong."""
    told_ns = lease.since.ToNanoseconds() if lease.HasField("since") and is_storable(lease.since) else now_ns
    return min(max(told_ns, earliest_ns), now_ns)
