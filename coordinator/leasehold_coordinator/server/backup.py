"""Backups of a coordinator: its store, its keys and its tokens, in one archive."""

import datetime
import errno
import itertools
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from leasehold_coordinator import __version__
from leasehold_coordinator.access.private_files import open_directory, sync_directory
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.storage.backup_archive import (
    FORMAT,
    FileEntry,
    Manifest,
    describe,
    unpack,
    write_archive,
)
from leasehold_coordinator.storage.database import file_of_database
from leasehold_coordinator.storage.schema import NEWEST
from leasehold_coordinator.storage.store_copy import copy_store

STORE: Final = "coordinator.sqlite3"
"""Name of the store in an archive. On disk, the settings may name another path."""

STORE_FILES: Final = ("", "-wal", "-shm", "-seal", "-journal")
"""Endings of the files of a store."""

TEMPORARY: Final = ".leasehold-"
"""Start of the name of the temporary directory beside an archive."""

MIGRATED: Final = "-tables-"
"""In the names of the copies that a store has from before its migrations. No backup has them."""


def create(state_directory: Path, database: str, archive: Path) -> Manifest:
    """Writes a backup. A coordinator may serve the store meanwhile.

    Args:
        state_directory: The coordinator's state directory.
        database: The store, a path or a URL.
        archive: The new file, which only this user may read.

    Raises:
        StartError: A file can't be used, or the archive exists, or would be in the state directory.
        OSError: A file can't be read or written. There is no archive. The error names no temporary file.
    """
    _require_owner(state_directory)
    if state_directory.resolve() in archive.resolve().parents:
        raise StartError(
            f"{archive} would be in the state directory {state_directory}, and in each later backup: choose "
            "another directory, on another disk"
        )
    if archive.exists():
        raise StartError(f"the file {archive} exists: choose another name, or remove the file")
    try:
        return _write(state_directory, file_of_database(database), archive)
    except OSError as error:
        raise _naming(archive, error) from error


def _naming(archive: Path, error: OSError) -> OSError:
    """An error of a temporary file, or of an unknown one, as an error of the archive."""
    beside = str(archive.resolve().parent / TEMPORARY)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    if error.errno is None or (names and not any(name.startswith(beside) for name in names)):
        return error
    return OSError(error.errno, error.strerror, str(archive))


def _write(state_directory: Path, store: Path | None, archive: Path) -> Manifest:
    sources = _state_files(state_directory, store)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=archive.resolve().parent) as folder:
        last_commit: int | None = None
        migration = ""
        if store is not None:
            sources[STORE] = Path(folder, STORE)
            last_commit, migration = copy_store(store, sources[STORE])
        for name, path in sources.items():  # a key may be replaced while it is read
            if name != STORE:
                sources[name] = Path(shutil.copy2(path, Path(folder, name.replace("/", "%"))))
        files = {name: describe(path, _mode(path)) for name, path in sources.items()}
        made_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        manifest = Manifest(FORMAT, __version__, made_at, last_commit, migration, files)
        unfinished = Path(folder, "archive")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            write_archive(file, manifest, sources)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(unfinished, archive)  # fails if the archive exists by now
        except FileExistsError:
            raise StartError(f"the file {archive} exists: choose another name, or remove the file") from None
    sync_directory(archive.resolve().parent)
    return manifest


def restore(archive: Path, state_directory: Path, database: str) -> Manifest:
    """Unpacks a backup into an empty state directory. The store is put there last.

    Args:
        archive: The backup.
        state_directory: The coordinator's state directory, which is created if it is missing.
        database: The path of the store, which must not exist, or a URL.

    Raises:
        StartError: The backup is damaged or of a newer release, there are files of a coordinator, or other
            users could change the state directory.
        OSError: A file can't be read or written.
    """
    store = file_of_database(database)
    if state_directory.exists():
        _require_owner(state_directory)
    folders = (state_directory, *state_directory.parents)
    made = list(itertools.takewhile(lambda folder: not folder.exists(), folders))
    try:
        open_directory(state_directory)
        return _restore(archive, state_directory, store)
    except (StartError, OSError) as error:
        with suppress(OSError):  # a file of the backup is there
            for folder in made:
                folder.rmdir()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            raise OSError(error.errno, error.strerror, str(state_directory)) from error
        raise


def _restore(archive: Path, state_directory: Path, store: Path | None) -> Manifest:
    _require_empty(state_directory, store)
    unpacked = state_directory / f".restore-{secrets.token_hex(8)}.new"
    unpacked.mkdir(mode=0o700)
    try:
        manifest = unpack(archive, unpacked)
        _require_fitting(manifest, archive, store)
        for name in sorted(manifest.files, key=lambda name: name == STORE):
            place = store if name == STORE and store is not None else state_directory / name
            _put(unpacked / name, place, manifest.files[name])
    finally:
        shutil.rmtree(unpacked)
    return manifest


def _require_fitting(manifest: Manifest, archive: Path, store: Path | None) -> None:
    if manifest.migration > NEWEST:
        raise StartError(
            f"the backup {archive} has tables of version {manifest.migration}, and this release knows "
            f"{NEWEST}: install leasehold {manifest.release} or later"
        )
    if manifest.last_commit is not None and store is None:
        raise StartError(
            f"the backup {archive} has a SQLite store, and the settings name a database server: name a file "
            "with --database"
        )
    if manifest.last_commit is None and store is not None:
        raise StartError(
            f"the backup {archive} has no store, because that was on a database server, and the settings "
            f"name the file {store}: name the server with --database"
        )


def _put(source: Path, place: Path, entry: FileEntry) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.move(source, place)  # the store may be on another file system
    place.chmod(entry.mode & 0o644)
    sync_directory(place.parent)


def _state_files(directory: Path, store: Path | None) -> dict[str, Path]:
    """Keys, certificates and tokens by name, without sockets and unfinished files."""
    left_out = {f"{store.resolve()}{ending}" for ending in STORE_FILES} if store is not None else set()
    found = (path for pattern in ("*", "*/*") for path in sorted(directory.glob(pattern)))
    return {
        str(path.relative_to(directory)): path
        for path in found
        if stat.S_ISREG(path.lstat().st_mode)
        and str(path.resolve()) not in left_out
        and not (store is not None and str(path.resolve()).startswith(f"{store.resolve()}{MIGRATED}"))
        and not path.name.startswith(".")
    }


def _require_owner(directory: Path) -> None:
    owner = directory.stat().st_uid
    if owner != os.geteuid():
        raise StartError(
            f"the state directory {directory} belongs to user {owner}: run the command as that user, "
            "because the coordinator must be able to read its files"
        )


def _require_empty(directory: Path, store: Path | None) -> None:
    found = next((path for path in directory.iterdir() if not path.name.startswith(".restore-")), None)
    if found is None and store is not None:
        found = next((path for path in (Path(f"{store}{end}") for end in STORE_FILES) if path.exists()), None)
    if found is not None:
        raise StartError(
            f"{found} exists: a backup is restored into an empty state directory only; stop the coordinator "
            "and move the old files away"
        )


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
