"""Backups of a coordinator: its store, its keys and its tokens, in one archive."""

import datetime
import errno
import itertools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from leasehold_coordinator import __version__
from leasehold_coordinator.access import authority, local_tokens, secret_vault
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

STATE_FILES: Final = (
    authority.CERTIFICATE_FILE,
    authority.KEY_FILE,
    authority.NEXT_KEY_FILE,
    local_tokens.CLIENT_FILE,
    local_tokens.WORKER_FILE,
    f"{secret_vault.DIRECTORY}/{secret_vault.ENVIRONMENT_FILE}",
    f"{secret_vault.DIRECTORY}/{secret_vault.REQUESTS_FILE}",
)
"""The files of a backup besides the store, by their names in the state directory.

A backup has no other file of the directory. By default, the state directory of this user's worker is inside,
and an old copy of a worker's journal would lose suspended workloads. Sessions of the web page are left out
too: a session of the backup could be older than its logout.
"""


def create(state_directory: Path, database: str, archive: Path) -> Manifest:
    """Writes a backup. A coordinator may serve the store meanwhile.

    Args:
        state_directory: The coordinator's state directory.
        database: The store, a path or a URL.
        archive: The new file, which only this user may read.

    Raises:
        StartError: A file can't be used or is a link, the directory has no files of a coordinator, or the
            archive exists, or would be in the state directory.
        OSError: A file can't be read or written. There is no archive. The error names no temporary file.
    """
    store = file_of_database(database)
    if state_directory.is_dir():
        _require_owner(state_directory)
    _require_files(state_directory, store)
    if state_directory.resolve() in archive.resolve().parents:
        raise StartError(
            f"{archive} would be in the state directory {state_directory}, and would be lost with it: choose "
            "another directory, on another disk"
        )
    if archive.exists():
        raise StartError(f"the file {archive} exists: choose another name, or remove the file")
    try:
        return _write(state_directory, store, archive)
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
    sources = _state_files(state_directory)
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


def restore(archive: Path, state_directory: Path, database: str) -> tuple[Manifest, list[str]]:
    """Unpacks a backup into a state directory without files of a coordinator. The store is put there last.

    Other files in the directory stay as they are, such as those of a worker.

    Args:
        archive: The backup.
        state_directory: The coordinator's state directory, which is created if it is missing.
        database: The path of the store, which must not exist, or a URL.

    Returns:
        The contents of the backup, and the names of the files that were left out, since ``create`` does not
        put such files into a backup.

    Raises:
        StartError: The backup is damaged or of a newer release, there are files of a coordinator, other users
            could change the state directory or its directory of keys, or the latter is a link.
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


def _restore(archive: Path, state_directory: Path, store: Path | None) -> tuple[Manifest, list[str]]:
    places = {name: state_directory / name for name in STATE_FILES}
    if store is not None:
        places[STORE] = store
    _require_no_coordinator(places)
    _open_keys(state_directory / secret_vault.DIRECTORY)
    unpacked = state_directory / f".restore-{secrets.token_hex(8)}.new"
    unpacked.mkdir(mode=0o700)
    try:
        manifest = unpack(archive, unpacked)
        _require_fitting(manifest, archive, store)
        for name, place in places.items():
            if name in manifest.files:
                _put(unpacked / name, place, manifest.files[name])
    finally:
        shutil.rmtree(unpacked)
    return manifest, sorted(manifest.files.keys() - places.keys())


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


def _state_files(directory: Path) -> dict[str, Path]:
    """The coordinator's keys, certificates and tokens, by name.

    Raises:
        StartError: One is not a regular file.
    """
    paths = {name: path for name in STATE_FILES if os.path.lexists(path := directory / name)}
    for path in paths.values():
        if not stat.S_ISREG(path.lstat().st_mode):
            raise StartError(
                f"{path} is not a regular file, and a backup without it would be incomplete: put the file "
                "itself there, such as in the place of a link"
            )
    return paths


def _open_keys(directory: Path) -> None:
    """Refuses an existing directory of keys that is a link, or that other users may change."""
    if not os.path.lexists(directory):
        return
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise StartError(f"{directory} is not a directory: move it away, and a restore creates the directory")
    open_directory(directory)


def files_left_out(state_directory: Path, paths: Mapping[str, str]) -> dict[str, Path]:
    """The files of settings that lie in the state directory and are in no backup.

    Args:
        state_directory: The coordinator's state directory.
        paths: Paths of files by the names of settings. Empty: the setting names no file.
    """
    state = state_directory.resolve()
    kept = {state / name for name in STATE_FILES}
    found = {name: Path(path) for name, path in paths.items() if path}
    places = {name: path.parent.resolve() / path.name for name, path in found.items()}
    return {
        name: found[name] for name, place in places.items() if state in place.parents and place not in kept
    }


def _require_files(directory: Path, store: Path | None) -> None:
    """Refuses a directory without files of a coordinator, unless the store is elsewhere."""
    is_elsewhere = store is not None and os.path.lexists(store)
    has_files = any(os.path.lexists(directory / name) for name in STATE_FILES)
    if not directory.is_dir() or not (has_files or is_elsewhere):
        raise StartError(
            f"the directory {directory} has no files of a coordinator: name the coordinator's state "
            "directory with --state-dir"
        )


def _require_owner(directory: Path) -> None:
    owner = directory.stat().st_uid
    if owner != os.geteuid():
        raise StartError(
            f"the state directory {directory} belongs to user {owner}: run the command as that user, "
            "because the coordinator must be able to read its files"
        )


def _require_no_coordinator(places: dict[str, Path]) -> None:
    paths = [str(path) for name, path in places.items() if name != STORE]
    if STORE in places:
        paths += [f"{places[STORE]}{ending}" for ending in STORE_FILES]
    found = [path for path in paths if os.path.lexists(path)]
    if found:
        raise StartError(
            f"a coordinator's files exist, and a restore overwrites nothing: {', '.join(found)}; stop the "
            "coordinator and move these files away. All other files can stay, such as a worker's"
        )


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
