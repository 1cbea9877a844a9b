"""The tables of a store: created, or migrated from those of an older release after a copy was made."""

import os
import sqlite3
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from leasehold_coordinator.storage.schema import METADATA, NEWEST
from leasehold_coordinator.storage.store_copy import copy_file

_VERSION: Final = sa.table("alembic_version", sa.column("version_num"))


def make_tables(connection: sa.Connection, path: Path | None) -> None:
    """Creates the tables of a new store, and migrates those of an older release.

    Args:
        connection: A connection to the locked store, in a transaction.
        path: The SQLite file, which is copied before a migration. None: it is on a server or in memory.

    Raises:
        SQLAlchemyError: A migration or the copy failed, or the store is of a newer release. It is unchanged.
    """
    if not sa.inspect(connection).get_table_names():
        _begin(connection)
        METADATA.create_all(connection)
        connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        connection.execute(sa.insert(_VERSION).values(version_num=NEWEST))
        return
    found = connection.scalar(sa.select(_VERSION.c.version_num)) or ""
    if found > NEWEST:
        raise sa.exc.InvalidRequestError(
            f"a newer release wrote it (tables {found}, and this release has {NEWEST}): start that release "
            "again, or restore a backup of this release with `leasehold backup restore`"
        )
    if found == NEWEST:
        return
    if path is not None:
        _keep_copy(path, found)
    # Imported late: the import takes as long as the rest of the start.
    from leasehold_coordinator.storage.migrate import migrate

    _begin(connection)
    migrate(connection)


def _begin(connection: sa.Connection) -> None:
    """Begins a transaction for changes of tables. Python's sqlite3 begins one for changes of rows only.

    A migration that fails halfway would otherwise leave a store that no release can open, and the next start
    would replace the copy by a copy of that store.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _keep_copy(path: Path, found: str) -> None:
    """Copies a store of an older release. The name has the number of the tables: one copy of each release."""
    copy, partial = (path.with_name(f"{path.name}-tables-{found}{suffix}") for suffix in ("", ".partial"))
    try:
        partial.unlink(missing_ok=True)
        try:
            copy_file(path, partial).close()
            os.replace(partial, copy)
        finally:
            partial.unlink(missing_ok=True)  # a full disk needs its room
    except (OSError, sqlite3.Error, ValueError) as error:  # a damaged number may be no name of a file
        raise sa.exc.InvalidRequestError(f"no copy can be made before its migration ({error})") from error
