"""Refusals in the audit: one entry per minute for each caller, with a count.

Anybody who reaches a listener can be refused a thousand times per second. So the first refusal of a caller
becomes an entry at the next tick, and all refusals of the following minute become the next entry. Memory, and
the number of entries over time, have bounds. Refusals of further callers count as those of one.
"""

import time
from dataclasses import dataclass
from typing import Final, final

from leasehold.v1 import audit_pb2, errors_pb2
from leasehold.v1.audit_pb2 import AuditEntry

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.core.allowance import Allowance
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.storage.rows import AuditRow
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import now_timestamp

REASONS: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_UNAUTHENTICATED,
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        errors_pb2.ERROR_REASON_JOIN_REFUSED,
        errors_pb2.ERROR_REASON_ALREADY_ENROLLED,
        errors_pb2.ERROR_REASON_CERTIFICATE_CLONED,
        errors_pb2.ERROR_REASON_IDENTITY_MISMATCH,
        errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID,
        errors_pb2.ERROR_REASON_DUPLICATE_WORKER_NAME,
        errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU,
        errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
    }
)
"""Reasons of refusals for lack of identity, role or ownership, and of workers that break a rule."""

PERIOD_S: Final = 60.0
CALLER_LIMIT: Final = 64
"""Callers with refusals of their own in a period. All further callers count as one."""

OTHERS: Final = "(other addresses)"

ENTRIES_PER_S: Final = 8 / 60
ENTRY_BURST: Final = 256
"""Most entries of refusals, in the long run and at once: 4 million in 400 days, about 2 GB."""

TEXT_LIMIT: Final = 256
"""Most characters of a message, a method or a resource, which callers may choose."""


@dataclass(slots=True)
class _Refused:
    """The refusals of one caller that have no entry yet.

    Attributes:
        entry: The entry of the next write, without the count.
        count: Number of the refusals.
        due_s: When the entry is due, by the monotonic clock.
    """

    entry: AuditEntry
    count: int
    due_s: float


@final
class AuditRefusals:
    """Collects refusals in memory, and stores them from the ticks of the coordinator.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._refused: dict[tuple[str, str], _Refused] = {}
        self._allowance = Allowance(ENTRIES_PER_S, ENTRY_BURST)

    def note(
        self,
        error: FleetError,
        method: str,
        address: str,
        *,
        caller: Caller | None = None,
        resource: str = "",
    ) -> None:
        """Counts a refusal, if its reason is one of :data:`REASONS`. Never waits.

        Args:
            error: The refusal.
            method: Full name of the method.
            address: The host of the caller.
            caller: The caller. None: the caller proved no identity.
            resource: What the caller named, as KIND/ID.
        """
        if error.reason not in REASONS:
            return
        key = (str(caller.identity) if caller is not None else "", address)
        if key not in self._refused and len(self._refused) >= CALLER_LIMIT:
            key = ("", OTHERS)
        refused = self._refused.get(key)
        if refused is None:
            refused = self._refused[key] = _Refused(AuditEntry(), 0, 0.0)
        if not refused.count:
            identity, address = key
            user = caller.on_behalf_of if caller is not None and identity else None
            refused.entry = AuditEntry(
                time=now_timestamp(),
                identity=identity,
                address=address,
                on_behalf_of=str(user or ""),
                method=method[:TEXT_LIMIT],
                resource=resource[:TEXT_LIMIT],
                outcome=audit_pb2.AUDIT_OUTCOME_REFUSED,
                reason=error.reason,
                message=error.message[:TEXT_LIMIT],
            )
        refused.count += 1

    async def flush(self, *, is_last: bool = False) -> None:
        """Stores the entries that are due.

        Args:
            is_last: All of them are due, since the coordinator stops.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next flush tries again.
        """
        now = time.monotonic()
        due: list[tuple[_Refused, int]] = []
        rows: list[AuditRow] = []
        for key, refused in list(self._refused.items()):
            if refused.due_s > now and not is_last:
                continue
            if not refused.count:
                del self._refused[key]
            elif is_last or self._allowance.take(1, now) == 0:
                refused.entry.count = refused.count
                rows.append(AuditRow(refused.entry))
                due.append((refused, refused.count))
                refused.count, refused.due_s = 0, now + PERIOD_S
        if not rows:
            return
        try:
            await self._store.write(*rows)
        except FleetError:
            for (refused, count), row in zip(due, rows, strict=True):
                refused.entry, refused.count, refused.due_s = row.entry, refused.count + count, 0.0
            raise
