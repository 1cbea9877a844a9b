"""The digest of each row of the store, by which a read notices a damaged row.

SQLite has no checksum for the content of a row, and PostgreSQL's may be off. The digest is of the table's
name and of every other column. Indexes have none: a row that a damaged index hides is not noticed.
"""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgspec
import sqlalchemy as sa

COLUMN: Final = "digest"

Values: TypeAlias = Mapping[str, Any] | sa.RowMapping
"""A row to write, or one that was read: values by column."""

_DIGEST_BYTES: Final = 16
_RENEWED_ROWS: Final = 1_000
"""Rows in memory at once while a migration makes digests."""


def row_digest(table: sa.Table, values: Values) -> bytes | None:
    """The digest of a row, given its values by column.

    Returns:
        None: a value does not have its column's type, as only damage brings about.
    """
    named: list[tuple[str, object]] = []
    for name, kind in _columns(table):
        value = values[name]
        if value is not None and type(value) is not kind:
            return None
        named.append((name, value))
    try:
        data = msgspec.msgpack.encode((str(table.name), named))
    except UnicodeEncodeError:  # text that was no UTF-8 on disk
        return None
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def is_whole(table: sa.Table, values: Values) -> bool:
    """Whether a row, all of whose columns were read, has its digest."""
    digest: object = values[COLUMN]
    return digest is not None and digest == row_digest(table, values)


def renew(connection: sa.Connection, table: sa.Table) -> None:
    """Gives each row of a table its digest. A migration calls this once it has changed rows or columns."""
    (key,) = table.primary_key.columns
    update = (
        sa.update(table).where(key == sa.bindparam("row_key")).values({COLUMN: sa.bindparam("row_digest")})
    )
    page = sa.select(table).order_by(key).limit(_RENEWED_ROWS)
    rows = connection.execute(page).mappings().all()
    while rows:
        digests = [{"row_key": row[key.name], "row_digest": row_digest(table, row)} for row in rows]
        connection.execute(update, digests)
        rows = connection.execute(page.where(key > rows[-1][key.name])).mappings().all()


@lru_cache(maxsize=16)
def _columns(table: sa.Table) -> tuple[tuple[str, type], ...]:
    """Names and types of the columns that count, by name: a migration appends its columns."""
    return tuple(sorted((str(one.name), one.type.python_type) for one in table.columns if one.name != COLUMN))
