"""The tables. A change here needs a migration in ``migrations/versions``.

A record is a serialized proto. Fields that queries use have columns of their own. ``digest`` covers all other
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
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

METADATA: Final = MetaData()

NEWEST: Final = "0019"
"""The newest migration. It makes the tables below."""

LARGE_RECORD: Final = "length(record) >= 4096"
"""The condition of rows with large records, as text: the database compares it with that of their index."""


def large_records_index(table: str) -> Index:
    """The index by ``served_s`` of the rows of a table that have large records."""
    condition = text(LARGE_RECORD)
    name = f"{table}_large_by_served_s"
    return Index(name, "served_s", sqlite_where=condition, postgresql_where=condition)


workers: Final = Table(
    "workers",
    METADATA,
    Column("worker_id", String, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("hello", LargeBinary, nullable=False),
    Column("has_left", Boolean),
    Column("digest", LargeBinary),
)
"""Every worker that ever connected, with its last hello (without leases and workloads).

``has_left``: its last session ended with its goodbye. Absent, in a row of an older release: unknown.
"""

workloads: Final = Table(
    "workloads",
    METADATA,
    Column("workload_id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("worker_id", String, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("create_time_ns", BigInteger, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
    Index("workloads_by_name_and_time", "name", "create_time_ns"),
    Index("workloads_by_end_and_time", "ended", "create_time_ns"),
    Index("workloads_by_time", "create_time_ns"),
    Index("workloads_by_served_s", "served_s"),
    large_records_index("workloads"),
)
"""Workloads as ``leasehold.v1.Workload``."""

commands: Final = Table(
    "commands",
    METADATA,
    Column("command_id", String, primary_key=True),
    Column("request_id", String, unique=True),
    Column("request_digest", LargeBinary),
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
    large_records_index("commands"),
)
"""Commands as ``leasehold.v1.Command``.

``instance_id``, ``accepted``, ``cancel_requested`` and ``request_digest`` are fields of
:class:`leasehold_coordinator.core.command_effects.StoredCommand`.
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
"""Events as ``leasehold.v1.Event``. Their ids sort by time."""

OPEN_END_NS: Final = 2**63 - 1
"""The end of a span that has not ended."""

USE_SPAN: Final = "s-"
PARKED_SPAN: Final = "p-"
"""Begins of the ids of spans: uses of GPUs, and parked workloads."""

lease_spans: Final = Table(
    "lease_spans",
    METADATA,
    Column("span_id", String, primary_key=True),
    Column("gpu_uuid", String, nullable=False),
    Column("worker_id", String, nullable=False),
    Column("workload_id", String, nullable=False),
    Column("begin_time_ns", BigInteger, nullable=False),
    Column("end_time_ns", BigInteger, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
    # Each index also has the begin, so that a query of a time reads no row outside of it.
    Index("lease_spans_by_end", "end_time_ns", "span_id", "begin_time_ns"),
    Index("lease_spans_by_gpu", "gpu_uuid", "end_time_ns", "span_id", "begin_time_ns"),
    Index("lease_spans_by_worker", "worker_id", "end_time_ns", "span_id", "begin_time_ns"),
    Index("lease_spans_by_workload", "workload_id", "end_time_ns", "span_id", "begin_time_ns"),
    Index("lease_spans_by_served_s", "served_s"),
)
"""The use of GPUs as ``leasehold.v1.LeaseSpan``."""

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

audit: Final = Table(
    "audit",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("identity", String, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("served_s", BigInteger),
    Column("digest", LargeBinary),
    Index("audit_by_identity", "identity", "number"),
)
"""The audit as ``leasehold.v1.AuditEntry``. Rows are only added, and deleted by their age, oldest first."""

audit_anchor: Final = Table(
    "audit_anchor",
    METADATA,
    Column("anchor_id", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("digest", LargeBinary),
)
"""The last deleted row of the audit, after which the stored chain begins, in one row."""
join_tokens: Final = Table(
    "join_tokens",
    METADATA,
    Column("join_token_id", String, primary_key=True),
    Column("secret_digest", LargeBinary, nullable=False),
    Column("joins", String, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("digest", LargeBinary),
)
"""Join tokens as ``leasehold.v1.JoinToken``, with the SHA-256 of each secret.

``joins`` has one word for each join: the SHA-256 of the public key, the identity, and the digest of each
certificate request, with colons between them. A word of an older version has no digests.
"""

worker_bindings: Final = Table(
    "worker_bindings",
    METADATA,
    Column("name", String, primary_key=True),
    Column("worker_id", String, nullable=False),
    Column("gpu_uuids", String, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("digest", LargeBinary),
)
"""Worker id and GPUs of each enrolled worker. ``gpu_uuids`` has one word for each GPU."""
role_bindings: Final = Table(
    "role_bindings",
    METADATA,
    Column("binding_key", String, primary_key=True),
    Column("record", LargeBinary, nullable=False),
    Column("digest", LargeBinary),
)
"""Roles of identities as ``leasehold.v1.RoleBinding``."""

clock: Final = Table(
    "clock",
    METADATA,
    Column("clock_id", String, primary_key=True),
    Column("served_s", BigInteger),
    Column("highest_time_ns", BigInteger),
    Column("digest", LargeBinary),
)
"""The clocks of the store, in one row.

``served_s`` is the total time in which the store was served. Retention uses this clock, since the host's
clock may jump by weeks. ``served_s`` in another table is the value of this clock at the end of the row's
command, workload or event. Absent: not ended. ``highest_time_ns`` is the highest time of the host's clock.
The expiry of credentials uses it, since the host's clock may be set back.
"""

certificates: Final = Table(
    "certificates",
    METADATA,
    Column("serial", String, primary_key=True),
    Column("identity", String, nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("predecessor", String, nullable=False),
    Column("authority", String, nullable=False),
    Column("not_before_ns", BigInteger, nullable=False),
    Column("not_after_ns", BigInteger, nullable=False),
    Column("certificate", LargeBinary, nullable=False),
    Column("digest", LargeBinary),
    Index("certificates_by_expiry", "not_after_ns"),
)
"""The client certificates that the CA has issued. The columns are the fields of
:class:`leasehold_coordinator.access.certificates.ClientCertificate`."""

revocations: Final = Table(
    "revocations",
    METADATA,
    Column("subject", String, primary_key=True),
    Column("actor", String, nullable=False),
    Column("create_time_ns", BigInteger, nullable=False),
    Column("digest", LargeBinary),
)
"""Revoked serial numbers, and blocked identities as ``KIND/NAME``."""

commits: Final = Table(
    "commits",
    METADATA,
    Column("commits_id", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
)
"""The number of commits of a SQLite store, one row for :mod:`leasehold_coordinator.storage.commit_seal`."""


def put_rows(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Inserts rows, or replaces rows with the same keys. All rows have the same columns.

    A row of the audit is never replaced.
    """
    text, parameters = _insertion(table, connection.dialect, tuple(rows[0]))
    connection.exec_driver_sql(text, [parameters(row) for row in rows])


@lru_cache(maxsize=16)
def _insertion(
    table: Table, dialect: Dialect, columns: tuple[str, ...]
) -> tuple[str, Callable[[dict[str, Any]], Any]]:
    """The compiled statement, and a function that turns a row into the driver's parameters.

    The values already have types of the driver, so SQLAlchemy's conversion of each value is skipped.
    """
    # Both dialects have the same syntax, but different classes.
    insert = postgresql.insert(table) if dialect.name == "postgresql" else sqlite.insert(table)
    statement: Insert = insert
    if table is not audit:
        (key,) = table.primary_key.columns
        new = {one.name: insert.excluded[one.name] for one in table.columns if one is not key}
        statement = insert.on_conflict_do_update(index_elements=[key], set_=new)
    compiled = statement.compile(dialect=dialect, column_keys=columns)
    return str(compiled), itemgetter(*compiled.positiontup) if compiled.positiontup else dict


def event_id_at(time_ns: int) -> str:
    """The beginning of an event's id, by its time."""
    return f"e-{time_ns:019d}"
