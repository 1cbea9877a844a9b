"""Writes changes to the tables."""

from collections.abc import Iterable
from typing import Any, Final

import sqlalchemy as sa

from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.audit_chain import AuditChain, delete_old
from leasehold_coordinator.storage.database import Database
from leasehold_coordinator.storage.read_errors import damaged
from leasehold_coordinator.storage.row_digests import COLUMN, is_whole, row_digest
from leasehold_coordinator.storage.rows import AuditRow, Change, CommandsOf, OldAudit, OldRows, Row

DELETE_LIMIT: Final = 500
"""Most rows of one deletion, so that other writes do not wait for long."""


def apply_changes(
    connection: sa.Connection, changes: Iterable[Change], served_s: int, audit: AuditChain
) -> None:
    """Applies the changes. Changes of one key keep their order. Rows of one table share a statement."""
    rows: dict[sa.Table, list[dict[str, Any]]] = {}
    for change in changes:
        if isinstance(change, Row):
            rows.setdefault(change.table, []).append(_whole(change, served_s))
            continue
        if isinstance(change, AuditRow):
            rows.setdefault(schema.audit, []).append(audit.append(connection, change.entry, served_s))
            continue
        _put(connection, rows)
        if isinstance(change, OldRows | CommandsOf):
            _delete(connection, change, served_s)
        elif isinstance(change, OldAudit):
            delete_old(connection, served_s - change.retention_s, DELETE_LIMIT)
        else:
            (column,) = change.table.primary_key.columns
            connection.execute(sa.delete(change.table).where(column == change.key))
    _put(connection, rows)


def _put(connection: sa.Connection, rows: dict[sa.Table, list[dict[str, Any]]]) -> None:
    """Writes the collected rows, and clears the collection."""
    for table, of_table in rows.items():
        schema.put_rows(connection, table, of_table)
    rows.clear()


def _whole(row: Row, served_s: int) -> dict[str, Any]:
    """The values of a row, with its digest."""
    values = dict(row.values)
    if "served_s" in row.table.columns:
        values["served_s"] = served_s if values.get("ended", True) else None
    values[COLUMN] = row_digest(row.table, values)
    return values


def _delete(connection: sa.Connection, rows: OldRows | CommandsOf, served_s: int) -> None:
    (key,) = rows.table.primary_key.columns
    statement = (
        sa.delete(rows.table).where(key.in_(_old_keys(rows, served_s).limit(DELETE_LIMIT))).returning(key)
    )
    rows.deleted[:] = connection.scalars(statement)  # anew, where a batch is committed again in parts


def _old_keys(rows: OldRows | CommandsOf, served_s: int) -> sa.Select[tuple[str]]:
    """Keys of the rows to delete, found by an index instead of a scan over many events."""
    if isinstance(rows, CommandsOf):
        table = schema.commands
        has_ended = sa.and_(table.c.ended, table.c.served_s.is_not(None))
        return sa.select(table.c.command_id).where(table.c.workload_id == rows.workload_id, has_ended)
    (key,) = rows.table.primary_key.columns
    column = rows.table.c.served_s
    statement = sa.select(key).where(column < served_s - rows.retention_s).order_by(column)
    return statement if rows.is_large is None else statement.where(size_condition(is_large=rows.is_large))


def size_condition(*, is_large: bool) -> sa.TextClause:
    """The condition of rows with large records, or of all others."""
    return sa.text(schema.LARGE_RECORD if is_large else f"NOT {schema.LARGE_RECORD}")


def read_clocks(database: Database) -> tuple[int, int]:
    """How many seconds the store had been served at its last write, and the highest time that it has seen.

    Returns:
        The seconds, and nanoseconds of the Unix epoch.

    Raises:
        FleetError: STORAGE_DAMAGED, the row is damaged.
    """
    with database.read() as connection:
        row = connection.execute(sa.select(schema.clock)).first()
    if row is None:
        return 0, 0
    if not is_whole(schema.clock, row._mapping):
        raise damaged(schema.clock, row)
    return row.served_s or 0, row.highest_time_ns or 0
