"""The chain of the audit in the store: new entries, their retention, and the proof that none was changed.

The writer thread numbers the entries within the transaction of the change that they record.
"""

import logging
from dataclasses import dataclass
from typing import Any, Final, final

import sqlalchemy as sa
from google.protobuf.message import DecodeError
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.audit_service_pb2 import AuditBreak

from leasehold_coordinator.core.audit_hashes import FIRST, entry_hash
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.row_digests import COLUMN, is_whole, row_digest

logger = logging.getLogger(__name__)

ANCHOR: Final = "anchor"
"""The key of the anchor, the only row of its table."""

PART_LIMIT: Final = 2_000
"""Most entries that one read checks. Each takes about 20 us."""


@dataclass(frozen=True, slots=True)
class Link:
    """An entry's number and hash. The next entry follows it."""

    number: int
    hash: bytes


@final
class AuditChain:
    """The end of the chain, which only the writer thread moves."""

    def __init__(self) -> None:
        self._last: Link | None = None
        """The last entry. None: unknown, such as after a failed transaction."""
        self.committed: Link | None = None
        """The last entry that this process has committed. Readable by every thread."""

    def append(self, connection: sa.Connection, entry: AuditEntry, served_s: int) -> dict[str, Any]:
        """The row of a new entry, with its number and hashes."""
        last = self._last or read_last(connection)
        whole = AuditEntry()
        whole.CopyFrom(entry)
        whole.number, whole.previous_hash = last.number + 1, last.hash
        whole.hash = entry_hash(whole)
        self._last = Link(whole.number, whole.hash)
        values: dict[str, Any] = {
            "number": whole.number,
            "identity": whole.identity,
            "record": whole.SerializeToString(),
            "served_s": served_s,
        }
        values[COLUMN] = row_digest(schema.audit, values)
        return values

    def confirm(self) -> None:
        """The transaction of the last entries was committed."""
        self.committed = self._last or self.committed

    def forget(self) -> None:
        """The transaction failed, or nobody knows whether it was committed."""
        self._last = None


def read_last(connection: sa.Connection) -> Link:
    """The last entry, or the anchor if there is none.

    A damaged last entry does not stop the coordinator: the next entry begins another chain, and
    :func:`check_part` reports the damage.
    """
    table = schema.audit
    row = connection.execute(sa.select(table).order_by(table.c.number.desc()).limit(1)).first()
    if row is None:
        return read_anchor(connection)
    entry = _parse(row.record)
    if entry is None:
        logger.error("the last entry of the audit, %d, is damaged: see `leasehold audit verify`", row.number)
        return Link(row.number, FIRST)
    return Link(row.number, entry.hash)


def read_anchor(connection: sa.Connection) -> Link:
    """The last entry that the retention has deleted, after which the stored chain begins."""
    row = connection.execute(sa.select(schema.audit_anchor)).first()
    return Link(0, FIRST) if row is None else Link(row.number, row.hash)


def delete_old(connection: sa.Connection, before_s: float, limit: int) -> int:
    """Deletes the oldest entries up to a time of service, and moves the anchor. Returns how many."""
    table, numbers = schema.audit, list[int]()
    oldest = sa.select(table.c.number, table.c.served_s).order_by(table.c.number).limit(limit)
    with connection.execute(oldest) as rows:
        for row in rows:
            if not isinstance(row.served_s, int) or row.served_s >= before_s:
                break
            numbers.append(row.number)
    if not numbers:
        return 0
    entry = _parse(connection.scalar(sa.select(table.c.record).where(table.c.number == numbers[-1])))
    values = {"anchor_id": ANCHOR, "number": numbers[-1], "hash": entry.hash if entry else FIRST}
    values[COLUMN] = row_digest(schema.audit_anchor, values)
    schema.put_rows(connection, schema.audit_anchor, [values])
    connection.execute(sa.delete(table).where(table.c.number <= numbers[-1]))
    return len(numbers)


def read_after(connection: sa.Connection, last: Link, limit: int) -> list[AuditEntry] | None:
    """The entries after one, oldest first. Damaged entries are left out.

    Returns:
        The entries. None: the chain does not have the entry, so it is another chain.
    """
    table, anchor = schema.audit, read_anchor(connection)
    if last.number > anchor.number:
        entry = _parse(connection.scalar(sa.select(table.c.record).where(table.c.number == last.number)))
        if entry is None or entry.hash != last.hash:
            return None
    rows = connection.scalars(
        sa.select(table.c.record).where(table.c.number > last.number).order_by(table.c.number).limit(limit)
    )
    return [entry for record in rows if (entry := _parse(record)) is not None]


@dataclass(frozen=True, slots=True)
class Part:
    """A checked part of the chain.

    Attributes:
        count: Number of its entries.
        last: Its last entry.
        broken: Where the chain is broken. None: nowhere in this part.
        is_last: Whether no entry follows.
    """

    count: int
    last: Link
    broken: AuditBreak | None
    is_last: bool


def check_part(connection: sa.Connection, after: Link | None, committed: Link | None) -> Part:
    """Recomputes the hashes of some entries.

    Args:
        connection: The connection.
        after: The last checked entry. None: the part begins at the anchor.
        committed: An entry that was committed before the connection reads. None: unknown.
    """
    anchor = read_anchor(connection)
    last = anchor if after is None or after.number < anchor.number else after
    table, count = schema.audit, 0
    rows = connection.execute(
        sa.select(table).where(table.c.number > last.number).order_by(table.c.number).limit(PART_LIMIT)
    )
    for row in rows:
        problem = _problem(row, last)
        if problem:
            number = min(row.number, last.number + 1)
            return Part(count, last, AuditBreak(number=number, problem=problem), is_last=True)
        entry = AuditEntry.FromString(row.record)
        last, count = Link(entry.number, entry.hash), count + 1
    is_last = count < PART_LIMIT
    if is_last and committed is not None and committed.number > last.number:
        problem = f"the entries from {last.number + 1} to {committed.number} are missing"
        return Part(count, last, AuditBreak(number=last.number + 1, problem=problem), is_last=True)
    return Part(count, last, None, is_last)


def _problem(row: sa.Row[Any], last: Link) -> str:
    """The problem of the entry after another one. Empty: none."""
    if row.number != last.number + 1:
        return f"entry {last.number + 1} is missing: entry {row.number} follows entry {last.number}"
    entry = _parse(row.record)
    if entry is None:
        return f"entry {row.number} can't be parsed"
    if entry.number != row.number:
        return f"entry {row.number} has the number {entry.number}"
    if entry.identity != row.identity:  # filters read the column
        return f"entry {row.number} is of {entry.identity!r}, and is listed as of {row.identity!r}"
    if not is_whole(schema.audit, row._mapping):
        return f"entry {row.number} is missing in lists: the digest of its row is wrong"
    if entry.previous_hash != last.hash:
        return f"entry {row.number} does not follow entry {last.number}: it names another previous hash"
    if entry.hash != entry_hash(entry):
        return f"entry {row.number} was changed: its hash is wrong"
    return ""


def _parse(record: object) -> AuditEntry | None:
    """An entry. None: the record is damaged."""
    try:
        return AuditEntry.FromString(record) if isinstance(record, bytes) else None
    except DecodeError:
        return None
