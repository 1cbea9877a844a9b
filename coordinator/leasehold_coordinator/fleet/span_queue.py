"""The changed spans of the history of leases that the store does not have yet.

Spans are collected in memory, and stored together a little later. A crash loses those of half a second, or of
the time for which the store refuses writes.
"""

import asyncio
import secrets
import time
from typing import Final, final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.lease_pb2 import LeaseSpan

from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.event_bounds import EventBounds
from leasehold_coordinator.storage.rows import lease_span_row
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import is_storable, timestamp

WAITING_LIMIT: Final = 65_536
"""Most spans that may wait for the store. Further changes are noted once the store has answered."""

SPANS_PER_S: Final = 2.0
SPAN_BURST: Final = 8_192
"""Most spans of one worker, in the long run and at once. A worker may report 200 times per second."""

LAST_ENDS_LIMIT: Final = 262_144
"""Most GPUs and workloads whose last end is remembered."""


@final
class SpanQueue:
    """The changed spans by id. A later change of a span replaces an earlier one.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, LeaseSpan] = {}
        self._flushing = asyncio.Lock()
        self._bounds = EventBounds("leases", SPANS_PER_S, SPAN_BURST)

    @property
    def is_full(self) -> bool:
        """Whether no further span may begin for now."""
        return len(self._waiting) >= WAITING_LIMIT

    def admits(self, worker_id: str, count: int = 1) -> bool:
        """Takes some spans of a worker's allowance. False: the spans do not begin for now."""
        return not self.is_full and self._bounds.admit(worker_id, count) is not None

    def put(self, span: LeaseSpan) -> None:
        """Adds a span that has begun or changed."""
        self._waiting[span.span_id] = span

    def end(self, span: LeaseSpan, time_ns: int) -> None:
        """Ends a span at a time, but not before its begin."""
        span.end_time.CopyFrom(timestamp(max(time_ns, span.begin_time.ToNanoseconds())))
        self.put(span)

    def forget(self, worker_id: str) -> None:
        """Forgets the allowance of a deleted worker."""
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


@final
class LastEnds:
    """When the last span of a GPU or of a workload ended, by worker and id. The oldest are forgotten."""

    def __init__(self) -> None:
        self._ends_ns: dict[tuple[str, str], int] = {}

    def note(self, worker_id: str, key: str, end_ns: int) -> None:
        """Notes an end.

        Args:
            worker_id: The worker.
            key: UUID of its GPU, or id of its workload.
            end_ns: The end.
        """
        latest_ns = max(end_ns, self._ends_ns.pop((worker_id, key), 0))
        self._ends_ns[worker_id, key] = latest_ns
        if len(self._ends_ns) > LAST_ENDS_LIMIT:
            del self._ends_ns[next(iter(self._ends_ns))]

    def of(self, worker_id: str, key: str) -> int:
        """The last end. 0: unknown."""
        return self._ends_ns.get((worker_id, key), 0)


def new_span_id(kind: str, time_ns: int) -> str:
    """An id by time. A worker may choose the time: the random part keeps it from the spans of others.

    Args:
        kind: Prefix of the ids of this kind of spans.
        time_ns: The begin of the span.
    """
    return f"{kind}{time_ns:019d}-{secrets.token_hex(8)}"


def told_time_ns(moment: Timestamp | None, earliest_ns: int = 0) -> int:
    """The time that a worker gives for a change, within what is possible. The worker's clock may be wrong.

    Args:
        moment: The time. None, or impossible: now.
        earliest_ns: The earliest possible time.
    """
    now_ns = time.time_ns()
    told_ns = now_ns if moment is None or not is_storable(moment) else moment.ToNanoseconds()
    return min(max(told_ns, earliest_ns), now_ns)
