"""Estimates of the bytes in the parts of the history, and in the audit.

An exact size would need a read of every row. A client chooses the size of its records, so rows with large
records are a part of their own: they take the place of each other, and not that of many small ones.
"""

import random
from dataclasses import dataclass
from typing import Final, final

import sqlalchemy as sa

from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.statements import size_condition

ROW_BYTES: Final = 128
"""Estimated bytes of a row beside its record: other columns, and entries of indexes."""

PAGE_BYTES: Final = 4_096

SAMPLE_ROWS: Final = 500
"""Number of rows whose records are measured."""


@final
@dataclass(frozen=True, slots=True)
class HistoryPart:
    """Rows of the history that are deleted together, the oldest first.

    Attributes:
        table: Their table.
        is_large: Whether they have large records. None: the table has no large records.
    """

    table: sa.Table
    is_large: bool | None = None


PARTS: Final = (
    HistoryPart(schema.commands, is_large=False),
    HistoryPart(schema.commands, is_large=True),
    HistoryPart(schema.workloads, is_large=False),
    HistoryPart(schema.workloads, is_large=True),
    HistoryPart(schema.events),
    HistoryPart(schema.lease_spans),
    HistoryPart(schema.deletions),
)


def count_ended(connection: sa.Connection, part: HistoryPart) -> int:
    """Number of ended rows of a part. Scans an index."""
    column = part.table.c.served_s
    statement = sa.select(sa.func.count()).select_from(part.table).where(column.is_not(None))
    count = connection.scalar(statement) or 0
    if part.is_large is None:
        return count
    large = connection.scalar(statement.where(size_condition(is_large=True))) or 0
    return large if part.is_large else count - large


def mean_bytes(connection: sa.Connection, part: HistoryPart) -> float:
    """Mean bytes of the oldest rows of a part, which a deletion would free."""
    if "record" not in part.table.columns:
        return ROW_BYTES
    column = part.table.c.served_s
    oldest = sa.select(part.table.c.record).where(column.is_not(None)).order_by(column).limit(SAMPLE_ROWS)
    if part.is_large is not None:
        oldest = oldest.where(size_condition(is_large=part.is_large))
    mean = connection.scalar(sa.select(sa.func.avg(sa.func.length(oldest.subquery().c.record))))
    return ROW_BYTES + float(mean or 0)


def audit_bytes(connection: sa.Connection) -> float:
    """Bytes of the audit, by the records of random rows: nobody can choose which are measured."""
    number, record = schema.audit.c.number, schema.audit.c.record
    first, last = connection.execute(sa.select(sa.func.min(number), sa.func.max(number))).one()
    if first is None:
        return 0.0
    count = last - first + 1
    sample = random.sample(range(first, last + 1), min(count, SAMPLE_ROWS))
    lengths = connection.scalars(sa.select(sa.func.length(record)).where(number.in_(sample))).all()
    mean = sum(map(_row_bytes, lengths)) / max(len(lengths), 1)
    return float(count * mean)


def _row_bytes(record_bytes: int) -> int:
    """Bytes of a row of the audit. A row of more than half a page of SQLite has a page of its own."""
    used_bytes = record_bytes + ROW_BYTES
    return PAGE_BYTES if PAGE_BYTES // 2 < used_bytes <= PAGE_BYTES else used_bytes
