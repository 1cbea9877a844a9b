"""The digest of each row of the store, by which a read notices a damaged row.

SQLite has no checksums of rows, and those of PostgreSQL may be off. The digest covers the table's name and
every other column. Indexes have no digest, so a row that a damaged index hides remains unnoticed.
"""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgspec
import sqlalchemy as sa

COLUMN: Final = "digest"

Values: TypeAlias = Mapping[str, Any] | sa.RowMapping
"""The values of a row by column, to write or as read."""

_DIGEST_BYTES: Final = 16
_RENEWED_ROWS: Final = 1_000
"""Rows per page while a migration computes digests."""


def row_digest(table: sa.Table, values: Values) -> bytes | None:
    """The digest of a row, given its values by column.

    Returns:
        The digest. None: a value does not have its column's type, which only damage can cause.
    """
    named: list[tuple[str, object]] = []
    for name, kind in _columns(table):
        value = values[name]
        if value is not None and type(value) is not kind:
            return None
        named.append((name, value))
    try:
        data = msgspec.msgpack.encode((str(table.name), named))
    except UnicodeEncodeError:  # the text on disk was not valid UTF-8
        return None
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def is_whole(table: sa.Table, values: Values) -> bool:
    """Whether the digest of a row matches its values. All columns must have been read."""
    digest: object = values[COLUMN]
    return digest is not None and digest == row_digest(table, values)


def renew(connection: sa.Connection, table: sa.Table) -> None:
    """Computes the digest of each row. A migration calls this after a change of rows or columns."""
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
    """Names and types of the digested columns, sorted by name: the order must not depend on migrations."""
    return tuple(sorted((str(one.name), one.type.python_type) for one in table.columns if one.name != COLUMN))
