"""The tables. A change here needs a migration in ``migrations/versions``.

Records are the protos themselves: what is queried stands in columns beside them. ``digest`` is of all other
columns of a row: see :mod:`leasehold_coordinator.storage.row_digests`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    Index,
    Insert,
    LargeBinary,
    MetaData,
    String,
    Table,
)
from sqlalchemy.dialects import postgresql, sqlite

METADATA: Final = MetaData()

NEWEST: Final = "0008"
"""The newest migration, whose tables these are."""

workers: Final = Table(
    "workers",
    METADATA,
    Column("worker_id", String, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("hello", LargeBinary, nullable=False),
    Column("digest", LargeBinary),
)
"""Every worker that ever connected, with its last hello (without leases and workloads)."""

workloads: Final = Table(
    "workloads",
    METADATA,
    Column("workload_id", String, primary_key=True),
    Column("name", String, nullable=False, index=True),
    Column("worker_id", String, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("create_time_ns", BigInteger, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
    Index("workloads_by_end_and_time", "ended", "create_time_ns"),
    Index("workloads_by_time", "create_time_ns"),
    Index("workloads_by_served_s", "served_s"),
)
"""Workloads as ``leasehold.v1.Workload``."""

commands: Final = Table(
    "commands",
    METADATA,
    Column("command_id", String, primary_key=True),
    Column("request_id", String, unique=True),
    Column("workload_id", String, nullable=False),
    Column("worker_id", String, nullable=False),
    Column("instance_id", String, nullable=False),
    Column("accepted", Boolean, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("create_time_ns", BigInteger, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
    Index("commands_by_end_and_time", "ended", "create_time_ns"),
    Index("commands_by_time", "create_time_ns"),
    Index("commands_by_workload_and_time", "workload_id", "create_time_ns"),
    Index("commands_by_served_s", "served_s"),
)
"""Commands as ``leasehold.v1.Command``.

Beside it: the worker's instance that it was last sent to ('' before), whether the worker has said that it has
it, and whether somebody asked to cancel it.
"""

events: Final = Table(
    "events",
    METADATA,
    Column("event_id", String, primary_key=True),
    Column("worker_id", String, nullable=False),
    Column("workload_id", String, nullable=False),
    Column("create_time_ns", BigInteger, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
    Index("events_by_worker", "worker_id", "event_id"),
    Index("events_by_workload", "workload_id", "event_id"),
    Index("events_by_served_s", "served_s"),
)
"""Events as ``leasehold.v1.Event``, whose ids are in the order of their times."""

deletions: Final = Table(
    "deletions",
    METADATA,
    Column("workload_id", String, primary_key=True),
    Column("worker_id", String, nullable=False),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
    Index("deletions_by_served_s", "served_s"),
)
"""Workloads whose records a client deleted. Their workers may remember them, and report them again."""

clock: Final = Table(
    "clock",
    METADATA,
    Column("clock_id", String, primary_key=True),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
)
"""For how long the store has been served in all, by one row.

Retention counts by this clock, since the host's may jump by weeks. ``served_s`` of another table is its value
at the end of the row's command, workload or event. Absent: not ended.
"""

commits: Final = Table(
    "commits",
    METADATA,
    Column("commits_id", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
)
"""The number of commits of a SQLite store, one row for :mod:`leasehold_coordinator.storage.commit_seal`."""


def put_rows(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Inserts rows, each in the place of the one with its key if there is one. All have the same columns."""
    text, parameters = _upsert(table, connection.dialect, tuple(rows[0]))
    connection.exec_driver_sql(text, [parameters(row) for row in rows])


@lru_cache(maxsize=16)
def _upsert(
    table: Table, dialect: Dialect, columns: tuple[str, ...]
) -> tuple[str, Callable[[dict[str, Any]], Any]]:
    """The statement as the driver takes it, and what makes the driver's parameters of a row.

    The values of rows are of types that drivers take. SQLAlchemy would look at each value again.
    """
    # Both say it with the same words, and each has a class for them.
    insert = postgresql.insert(table) if dialect.name == "postgresql" else sqlite.insert(table)
    (key,) = table.primary_key.columns
    new = {one.name: insert.excluded[one.name] for one in table.columns if one is not key}
    statement: Insert = insert.on_conflict_do_update(index_elements=[key], set_=new)
    compiled = statement.compile(dialect=dialect, column_keys=columns)
    return str(compiled), itemgetter(*compiled.positiontup) if compiled.positiontup else dict


def event_id_at(time_ns: int) -> str:
    """What the ids of the events of a moment begin with."""
    return f"e-{time_ns:019d}"
