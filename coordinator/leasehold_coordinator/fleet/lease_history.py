"""The history of leases: which workload used which GPU, and when a GPU was unavailable for another reason.

Each publication of a worker is compared with the open spans of its GPUs. Changed spans are collected in
memory and stored together a little later. Nothing depends on them, and a crash loses those of half a second:
after a restart, the reports of the workers end and begin the spans that differ.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias, final

from leasehold.v1 import lease_pb2
from leasehold.v1.lease_pb2 import GpuLease, LeaseSpan, SlotState
from leasehold.v1.worker_pb2 import FleetGpu

from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.event_bounds import EventBounds
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads
from leasehold_coordinator.storage.rows import lease_span_row
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import is_storable, timestamp

WAITING_LIMIT: Final = 65_536
"""Most spans that may wait for the store. Further changes are noted once the store has answered."""

SPANS_PER_S: Final = 2.0
SPAN_BURST: Final = 8_192
"""Most spans of the GPUs of one worker, in the long run and at once. A worker may report 200 times per
second."""

ID_LIMIT: Final = 256
"""Characters of an id in a span. A worker may report longer ids in a load."""

_NO_USE: Final = (lease_pb2.SLOT_STATE_UNSPECIFIED, lease_pb2.SLOT_STATE_FREE)

_Use: TypeAlias = "tuple[SlotState.ValueType, str, str]"
"""State of a slot, id of the lease, and id of the workload."""


@final
class LeaseHistory:
    """The open spans of all GPUs, and the changed spans that are not stored yet.

    Args:
        store: The store.
        workloads: The workloads that have not ended, for the names of the holders.
    """

    def __init__(self, store: Store, workloads: LiveWorkloads) -> None:
        self._store = store
        self._workloads = workloads
        self._open: dict[str, dict[str, LeaseSpan]] = {}
        """Open spans by GPU, by id of the worker."""
        self._sessions: dict[str, str | None] = {}
        """The session of the last comparison, by id of the worker."""
        self._waiting: dict[str, LeaseSpan] = {}
        """Changed spans by id. A later change of a span replaces an earlier one."""
        self._flushing = asyncio.Lock()
        self._bounds = EventBounds("leases", SPANS_PER_S, SPAN_BURST)

    def load(self, spans: Iterable[LeaseSpan]) -> None:
        """Takes the open spans of the store, oldest first. A later span of a GPU ends an earlier one."""
        for span in spans:
            of_worker = self._open.setdefault(span.worker_id, {})
            if (earlier := of_worker.get(span.gpu_uuid)) is not None:
                self._end(earlier, span.begin_time.ToNanoseconds())
            of_worker[span.gpu_uuid] = span

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
        for uuid in of_worker.keys() - {gpu.gpu.uuid for gpu in gpus}:
            self._end(of_worker.pop(uuid), now_ns)
        for gpu in gpus:
            span = of_worker.get(gpu.gpu.uuid)
            if (_NO_USE_KEY if span is None else _use_of_span(span)) == _use(gpu.lease):
                if span is not None:
                    self._name(span)
                continue
            if self._bounds.admit(worker_id) is None:
                continue  # compared again at the next publication
            time_ns = _change_time_ns(gpu.lease, span, now_ns) if is_first else now_ns
            if span is not None:
                self._end(of_worker.pop(gpu.gpu.uuid), time_ns)
            if gpu.lease.state not in _NO_USE:
                of_worker[gpu.gpu.uuid] = self._begin(gpu, time_ns)

    def forget(self, worker_id: str) -> None:
        """Ends the spans of a deleted worker."""
        for span in self._open.pop(worker_id, {}).values():
            self._end(span, time.time_ns())
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
            # The worker may choose the time. The random part keeps it from the spans of other workers.
            span_id=f"s-{time_ns:019d}-{secrets.token_hex(8)}",
            gpu_uuid=gpu.gpu.uuid,
            worker_id=gpu.worker_id,
            worker_name=gpu.worker_name,
            slot=gpu.gpu.slot,
            state=state,
            lease_id=lease_id,
            workload_id=workload_id,
            begin_time=timestamp(time_ns),
        )
        self._waiting[span.span_id] = span
        self._name(span)
        return span

    def _name(self, span: LeaseSpan) -> None:
        """Adds name and owner of the workload. A worker may report a lease before its workload."""
        workload = self._workloads.get(span.workload_id) if not span.workload_name else None
        if workload is not None and workload.worker_id == span.worker_id:
            span.workload_name, span.owner = workload.name, workload.owner
            self._waiting[span.span_id] = span

    def _end(self, span: LeaseSpan, time_ns: int) -> None:
        span.end_time.CopyFrom(timestamp(max(time_ns, span.begin_time.ToNanoseconds())))
        self._waiting[span.span_id] = span


def _use(lease: GpuLease) -> _Use:
    """The use that a lease entry shows."""
    if lease.state in _NO_USE:
        return _NO_USE_KEY
    return lease.state, lease.lease_id[:ID_LIMIT], lease.workload_id[:ID_LIMIT]


def _use_of_span(span: LeaseSpan) -> _Use:
    return span.state, span.lease_id, span.workload_id


_NO_USE_KEY: Final[_Use] = (lease_pb2.SLOT_STATE_FREE, "", "")


def _change_time_ns(lease: GpuLease, before: LeaseSpan | None, now_ns: int) -> int:
    """When a use changed while the worker was out of contact. The worker's clock may be wrong."""
    earliest_ns = before.begin_time.ToNanoseconds() if before is not None else 0
    told_ns = lease.since.ToNanoseconds() if lease.HasField("since") and is_storable(lease.since) else now_ns
    return min(max(told_ns, earliest_ns), now_ns)
