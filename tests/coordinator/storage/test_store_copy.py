"""A copy of a store on a disk that is full or fails."""

import errno
import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from leasehold_coordinator.storage.store_copy import copy_store


def test_errors_of_the_copy_are_those_of_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, copy = tmp_path / "store.sqlite3", tmp_path / "copy"
    with closing(sqlite3.connect(path)) as store:
        store.execute("CREATE TABLE commits (number INTEGER)")
    connect = sqlite3.connect

    def connect_to_full_disk(database: str | Path, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(database, **options)
        if database == copy:
            connection.execute("PRAGMA max_page_count=1")  # SQLite answers as on a full disk
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_full_disk)
    with pytest.raises(OSError, match="No space left on device") as error:
        copy_store(path, copy)
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(copy)


def test_a_write_that_fails_is_an_error_of_the_copy(tmp_path: Path) -> None:
    path, copy = tmp_path / "store.sqlite3", tmp_path / "copy"
    with closing(sqlite3.connect(path)) as store:
        store.execute("CREATE TABLE commits (number INTEGER)")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(OSError, match="Input/output error") as error:
            copy_store(path, copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(copy)
