"""Refusals and logins in the audit: one entry per minute for each caller, method and reason, with a count.

Anybody who reaches a listener can be counted a thousand times per second. So the first refusal of a caller by
a method for a reason becomes an entry at the next tick, and all such refusals of the next minute become the
next entry. Memory, and the number of entries over time, have bounds. Refusals of further callers count as
those of one, and those by further methods as those by one. An entry names the first resources of its minute.

Refusals for lack of a right have places and entries of their own: nobody hides them behind others.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto, unique
from operator import attrgetter, itemgetter
from typing import Final, TypeAlias, final

from leasehold.v1 import audit_pb2, errors_pb2
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.errors_pb2 import ErrorReason

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.methods import CHANGES
from leasehold_coordinator.core.allowance import Allowance
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import TEXT_LIMIT, audited_text
from leasehold_coordinator.shielded_tasks import finish
from leasehold_coordinator.storage.rows import AuditRow
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.timestamps import now_timestamp

RIGHTS: Final = frozenset(
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

BOUNDS: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_TOO_MANY_BINDINGS,
        errors_pb2.ERROR_REASON_TOO_MANY_BLOCKS,
        errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
        errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS,
        errors_pb2.ERROR_REASON_TOO_MANY_JOIN_TOKENS,
        errors_pb2.ERROR_REASON_TOO_MANY_WORKERS,
    }
)
"""Reasons of refusals by a bound of the coordinator."""

FAILURES: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_CALL_TIMEOUT,
        errors_pb2.ERROR_REASON_INTERNAL,
        errors_pb2.ERROR_REASON_ISSUER_UNAVAILABLE,
        errors_pb2.ERROR_REASON_STORAGE_DAMAGED,
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
    }
)
"""Reasons of calls that failed and were not refused. They have no entry."""

PERIOD_S: Final = 60.0
CALLER_LIMIT: Final = 64
"""Callers of one sort of entries that are counted apart. All further callers count as one."""

METHOD_LIMIT: Final = 32
"""Methods and reasons of one caller that are counted apart. Further methods count as one for each reason."""

LOGIN: Final = "login"
"""The method of a login by a token of an issuer, and of a refused login to the web page."""

OTHERS: Final = "(other addresses)"
OTHER_METHODS: Final = "(other methods)"

ENTRIES_PER_S: Final = 8 / 60
ENTRY_BURST: Final = 256
"""Most entries of a sort, in the long run and at once.

400 days of them take 2 GB, and 4 GB with the longest texts.
"""

RESOURCE_LIMIT: Final = 8
"""Most resources of an entry. An entry with more of them ends with :data:`MORE`."""

MORE: Final = "…"
"""Stands for the resources of an entry above a limit."""


@unique
class _Sort(Enum):
    """The sorts of entries. None takes places of another."""

    UNKNOWN = auto()
    """Refusals for lack of a right, of callers without an identity."""
    RIGHTS = auto()
    """Refusals for lack of a right, of callers with an identity."""
    LOGINS = auto()
    REQUESTS = auto()
    """Refusals for other reasons, of callers with an identity."""


@dataclass(slots=True)
class _Counted:
    """The refusals or logins of one key that have no entry yet.

    Attributes:
        entry: The entry of the next write, without the count.
        count: Their number.
        due_s: When the entry is due, by the monotonic clock.
        began_s: When the first of them was counted.
        resources: The first of its resources, each once.
    """

    entry: AuditEntry = field(default_factory=AuditEntry)
    count: int = 0
    due_s: float = 0.0
    began_s: float = 0.0
    resources: dict[str, None] = field(default_factory=dict)

    @property
    def waits_from_s(self) -> float:
        """The time from which the entry waits for its write."""
        return max(self.due_s, self.began_s)

    def add_resources(self, resources: Iterable[str]) -> None:
        """Adds resources, up to one more than the limit. That one shows that there were more."""
        for resource in resources:
            if resource not in self.resources and len(self.resources) <= RESOURCE_LIMIT:
                self.resources[resource] = None


_Who: TypeAlias = tuple[str, str]
"""Identity and address."""

_What: TypeAlias = tuple[str, str, ErrorReason.ValueType]
"""Method, the user for whom the caller acted, and the reason."""


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
        self._callers: dict[_Sort, dict[_Who, dict[_What, _Counted]]] = {sort: {} for sort in _Sort}
        self._allowances = {sort: _entry_allowance() for sort in _Sort}
        self._allowances[_Sort.LOGINS] = self._allowances[_Sort.RIGHTS]

    def note(
        self,
        error: FleetError,
        method: str,
        address: str,
        *,
        caller: Caller | None = None,
        resources: Iterable[str] = (),
    ) -> None:
        """Counts a refusal, unless it needs no entry. Never waits.

        Refusals for :data:`RIGHTS` have entries. So have all refusals of a caller with an identity by a
        method that changes something, and those for :data:`BOUNDS` by other methods.

        Args:
            error: The refusal. Its ``audited`` goes first.
            method: Full name of the method.
            address: The host of the caller.
            caller: The caller. None: the caller proved no identity.
            resources: What the caller named, as KIND/NAME each.
        """
        error = error.audited or error
        if error.reason in RIGHTS:
            sort = _Sort.RIGHTS if caller is not None else _Sort.UNKNOWN
        elif caller is not None and (
            error.reason in BOUNDS or (method in CHANGES and error.reason not in FAILURES)
        ):
            sort = _Sort.REQUESTS
        else:
            return
        counted = self._count(sort, caller, address, method, error)
        # A comma ends a resource.
        counted.add_resources(audited_text(resource).replace(",", "\\x2c") for resource in resources)

    def note_login(self, caller: Caller) -> None:
        """Counts the first call with a token of an issuer. Never waits."""
        self._count(_Sort.LOGINS, caller, caller.address, LOGIN, None)

    def _count(
        self, sort: _Sort, caller: Caller | None, address: str, method: str, error: FleetError | None
    ) -> _Counted:
        """Counts something. Only the first of its key makes an entry: a flood must stay cheap."""
        who = str(caller.identity) if caller is not None else "", address
        user = str(caller.on_behalf_of or "") if caller is not None else ""
        reason = error.reason if error is not None else errors_pb2.ERROR_REASON_UNSPECIFIED
        callers = self._callers[sort]
        if who not in callers and len(callers) >= CALLER_LIMIT:
            who, user = ("", OTHERS), ""
        methods = callers.setdefault(who, {})
        what = audited_text(method), user, reason
        if what not in methods and len(methods) >= METHOD_LIMIT:
            what = OTHER_METHODS, "", reason
        counted = methods.get(what)
        if counted is None:
            counted = methods[what] = _Counted()
        if not counted.count:
            counted.began_s = time.monotonic()
            identity, host = who
            allowed, refused = audit_pb2.AUDIT_OUTCOME_ALLOWED, audit_pb2.AUDIT_OUTCOME_REFUSED
            counted.entry = AuditEntry(
                time=now_timestamp(),
                identity=identity,
                address=host,
                method=what[0],
                on_behalf_of=what[1],
                outcome=allowed if error is None else refused,
                reason=reason,
                message=audited_text(error.message) if error is not None else "",
            )
        counted.count += 1
        return counted

    async def flush(self, *, is_last: bool = False) -> None:
        """Stores the entries that are due. If the caller is cancelled, the write goes on.

        Args:
            is_last: All of them are due, since the coordinator stops.

        Raises:
            FleetError: STORAGE_UNAVAILABLE. The next flush tries again.
        """
        now = time.monotonic()
        due: list[tuple[_Counted, int, dict[str, None]]] = []
        rows: list[AuditRow] = []
        self._forget_idle(now)
        for sort, counted in self._waiting(math.inf if is_last else now):
            if is_last or self._allowances[sort].take(1, now) == 0:
                counted.entry.count, counted.entry.resource = counted.count, _joined(counted.resources)
                rows.append(AuditRow(counted.entry))
                due.append((counted, counted.count, counted.resources))
                counted.count, counted.due_s, counted.resources = 0, now + PERIOD_S, {}
        if rows:
            await finish(self._write(due, rows))

    async def _write(
        self, due: Sequence[tuple[_Counted, int, dict[str, None]]], rows: Sequence[AuditRow]
    ) -> None:
        """Writes entries. If the write fails, their counts wait for the next flush.

        A cancellation must not give them back, as :meth:`Events.flush` does: the write may yet succeed, and a
        second write of an entry would count its refusals twice.
        """
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
        for callers in self._callers.values():
            for who, methods in list(callers.items()):
                for what, counted in list(methods.items()):
                    if not counted.count and counted.due_s <= now:
                        del methods[what]
                if not methods:
                    del callers[who]

    def _waiting(self, until: float) -> list[tuple[_Sort, _Counted]]:
        """The entries that are due until then, with their sorts: each caller in turn, the longest wait first.

        So a caller of many methods does not delay the entries of others, and a few callers that are always
        due do not use up the rate of entries.
        """
        waiting: list[tuple[int, float, _Sort, _Counted]] = []
        for sort, callers in self._callers.items():
            for methods in callers.values():
                due = (one for one in methods.values() if one.count and one.due_s <= until)
                in_order = sorted(due, key=attrgetter("waits_from_s"))
                waiting += ((place, one.waits_from_s, sort, one) for place, one in enumerate(in_order))
        return [(sort, counted) for _, _, sort, counted in sorted(waiting, key=itemgetter(0, 1))]


def _joined(resources: Iterable[str]) -> str:
    """Resources as one text within its limit, whole each. The first resource is cut if it is longer."""
    joined = ""
    for place, resource in enumerate(resources):
        longer = f"{joined}, {resource}" if joined else resource[:TEXT_LIMIT]
        if place == RESOURCE_LIMIT or (joined and len(longer) + len(MORE) + 2 > TEXT_LIMIT):
            return f"{joined}, {MORE}"
        joined = longer
    return joined
