"""Refusals and logins in the audit: one entry per minute for each caller and method, with a count.

Anybody who reaches a listener can be counted a thousand times per second. So the first refusal of a caller by
a method becomes an entry at the next tick, and all such refusals of the next minute become the next entry.
Memory, and the number of entries over time, have bounds. Refusals of further callers count as those of one,
and those by further methods as those by one. An entry names the first resources of its minute.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, final

from leasehold.v1 import audit_pb2, errors_pb2
from leasehold.v1.audit_pb2 import AuditEntry

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.core.allowance import Allowance
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import TEXT_LIMIT, audited_text
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
"""Callers with an identity, and without one, that are counted apart. All further callers count as one."""

METHOD_LIMIT: Final = 32
"""Methods of one caller that are counted apart. All further methods count as one."""

LOGIN: Final = "login"
"""The method of a login by a token of an issuer, which is no call of its own."""

OTHERS: Final = "(other addresses)"
OTHER_METHODS: Final = "(other methods)"

ENTRIES_PER_S: Final = 8 / 60
ENTRY_BURST: Final = 256
"""Most entries, in the long run and at once, with and without an identity: 2 GB each in 400 days."""

RESOURCE_LIMIT: Final = 8
"""Most resources of an entry. An entry with more of them ends with :data:`MORE`."""

MORE: Final = "…"
"""Stands for the resources of an entry above a limit."""


@dataclass(slots=True)
class _Counted:
    """The refusals or logins of one caller by one method that have no entry yet.

    Attributes:
        entry: The entry of the next write, without the count.
        count: Their number.
        due_s: When the entry is due, by the monotonic clock.
        resources: The first of its resources, each once.
    """

    entry: AuditEntry
    count: int
    due_s: float
    resources: dict[str, None] = field(default_factory=dict)

    def add_resources(self, resources: Iterable[str]) -> None:
        """Adds resources, up to one more than the limit. That one shows that there were more."""
        for resource in resources:
            if resource not in self.resources and len(self.resources) <= RESOURCE_LIMIT:
                self.resources[resource] = None


def _entry_allowance() -> Allowance:
    return Allowance(ENTRIES_PER_S, ENTRY_BURST)


@final
class AuditRefusals:
    """Collects refusals and logins in memory, and stores them from the ticks of the coordinator.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._callers: dict[tuple[str, str, int], dict[tuple[str, str], _Counted]] = {}
        """By identity, address and outcome, then by method and the user for whom the caller acted."""
        self._allowances = {has_identity: _entry_allowance() for has_identity in (False, True)}
        """Of callers with and without an identity: nobody without one holds up the others."""

    def note(
        self,
        error: FleetError,
        method: str,
        address: str,
        *,
        caller: Caller | None = None,
        resources: Iterable[str] = (),
    ) -> None:
        """Counts a refusal, if its reason is one of :data:`REASONS`. Never waits.

        Args:
            error: The refusal. Its ``audited`` goes first.
            method: Full name of the method.
            address: The host of the caller.
            caller: The caller. None: the caller proved no identity.
            resources: What the caller named, as KIND/NAME each.
        """
        error = error.audited or error
        if error.reason not in REASONS:
            return
        self._count(
            AuditEntry(
                identity=str(caller.identity) if caller is not None else "",
                on_behalf_of=str(caller.on_behalf_of or "") if caller is not None else "",
                address=address,
                method=audited_text(method),
                outcome=audit_pb2.AUDIT_OUTCOME_REFUSED,
                reason=error.reason,
                message=audited_text(error.message),
            ),
            # A comma ends a resource.
            (audited_text(resource).replace(",", "\\x2c") for resource in resources),
        )

    def note_login(self, caller: Caller) -> None:
        """Counts the first call with a token of an issuer. Never waits."""
        self._count(
            AuditEntry(
                identity=str(caller.identity),
                address=caller.address,
                method=LOGIN,
                outcome=audit_pb2.AUDIT_OUTCOME_ALLOWED,
            )
        )

    def _count(self, entry: AuditEntry, resources: Iterable[str] = ()) -> None:
        """Counts something. The first of its kind gives the entry."""
        key = (entry.identity, entry.address, entry.outcome)
        alike = sum(bool(identity) == bool(entry.identity) for identity, _, _ in self._callers)
        if key not in self._callers and alike >= CALLER_LIMIT:
            key = ("", OTHERS, entry.outcome)
            entry.identity, entry.address, entry.on_behalf_of = "", OTHERS, ""
        methods = self._callers.setdefault(key, {})
        if (entry.method, entry.on_behalf_of) not in methods and len(methods) >= METHOD_LIMIT:
            entry.method, entry.on_behalf_of = OTHER_METHODS, ""
        counted = methods.setdefault((entry.method, entry.on_behalf_of), _Counted(AuditEntry(), 0, 0.0))
        if not counted.count:
            entry.time.CopyFrom(now_timestamp())
            counted.entry = entry
        counted.count += 1
        counted.add_resources(resources)

    async def flush(self, *, is_last: bool = False) -> None:
        """Stores the entries that are due.

        Args:
            is_last: All of them are due, since the coordinator stops.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next flush tries again.
        """
        now = time.monotonic()
        due: list[tuple[_Counted, int, dict[str, None]]] = []
        rows: list[AuditRow] = []
        self._forget_idle(now)
        for has_identity, counted in self._waiting(math.inf if is_last else now):
            if is_last or self._allowances[has_identity].take(1, now) == 0:
                counted.entry.count, counted.entry.resource = counted.count, _joined(counted.resources)
                rows.append(AuditRow(counted.entry))
                due.append((counted, counted.count, counted.resources))
                counted.count, counted.due_s, counted.resources = 0, now + PERIOD_S, {}
        if not rows:
            return
        try:
            await self._store.write(*rows)
        except FleetError:
            for (counted, count, resources), row in zip(due, rows, strict=True):
                counted.entry, counted.count, counted.due_s = row.entry, counted.count + count, 0.0
                later, counted.resources = counted.resources, resources
                counted.add_resources(later)
            raise

    def _forget_idle(self, now: float) -> None:
        """Forgets what had no refusal for a minute."""
        for key, methods in list(self._callers.items()):
            for method, counted in list(methods.items()):
                if not counted.count and counted.due_s <= now:
                    del methods[method]
            if not methods:
                del self._callers[key]

    def _waiting(self, until: float) -> list[tuple[bool, _Counted]]:
        """The entries that are due until then, and whether each has an identity: each caller in turn.

        So a caller of many methods does not delay the entries of others.
        """
        waiting: list[tuple[int, bool, _Counted]] = []
        for (identity, _, _), methods in self._callers.items():
            due = (one for one in methods.values() if one.count and one.due_s <= until)
            waiting += ((place, bool(identity), counted) for place, counted in enumerate(due))
        return [(has_identity, counted) for _, has_identity, counted in sorted(waiting, key=itemgetter(0))]


def _joined(resources: Iterable[str]) -> str:
    """Resources as one text within its limit, whole each. The first resource is cut if it is longer."""
    joined = ""
    for place, resource in enumerate(resources):
        longer = f"{joined}, {resource}" if joined else resource[:TEXT_LIMIT]
        if place == RESOURCE_LIMIT or (joined and len(longer) + len(MORE) + 2 > TEXT_LIMIT):
            return f"{joined}, {MORE}"
        joined = longer
    return joined
