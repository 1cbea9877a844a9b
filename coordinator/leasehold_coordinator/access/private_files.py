"""Private files of the state directory.

They are created whole or not at all, and read only if no other user could change them.
"""

import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from leasehold_coordinator.errors import StartError

PRIVATE: Final = 0o700
"""Permissions of a state directory."""

FILE_LIMIT_BYTES: Final = 65_536
UNFINISHED: Final = ".new"
"""End of the name of a file that is not complete yet."""

UNFINISHED_AGE_S: Final = 60.0
"""Age from which on nobody is still writing such a file."""


def open_directory(directory: Path) -> None:
    """Creates a missing state directory, and removes the permissions of other users from an existing one.

    Raises:
        StartError: Another user could replace files in it. It is the root directory.
        OSError: It can't be created.
    """
    if os.path.realpath(directory) == "/":  # no other user could use the host any more
        raise StartError(
            f"the state directory {directory} is the root directory: choose another directory with "
            "--state-dir"
        )
    directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    require_ours(directory, "--state-dir")
    found = directory.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        directory.chmod(PRIVATE)
    _sweep(directory)


def require_ours(directory: Path, option: str) -> None:
    """Refuses a directory in which another user could replace files, or which that user could replace.

    Args:
        directory: The existing directory.
        option: The option that names another one, for the message.

    Raises:
        StartError: Another user owns or may change a part of its path.
        OSError: The path can't be read.
    """
    resolved = directory.resolve()
    for part in (resolved, *resolved.parents):
        found = part.stat()
        # The group may write: the group of an ordinary user has no other member (umask 002).
        is_shared = found.st_mode & stat.S_IWOTH and (part == resolved or not found.st_mode & stat.S_ISVTX)
        if found.st_uid not in (0, os.geteuid()) or is_shared:
            raise StartError(
                f"other users may change {part}: make it yours with mode 0700, or choose another directory "
                f"with {option}"
            )


def _sweep(directory: Path) -> None:
    """Removes files that a killed coordinator had not finished. One of them may hold a key."""
    for path in directory.glob(f".*{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNFINISHED_AGE_S:
                path.unlink()


def create_file(path: Path, content: bytes, mode: int = 0o600) -> bool:
    """Creates a file, unless it exists. Nobody ever sees a part of it, also after a crash.

    Returns:
        Whether this call created it. Another coordinator of this user may have been first.
    """
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}{UNFINISHED}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.link(new, path)
    except FileExistsError:
        return False
    finally:
        new.unlink()
        sync_directory(path.parent)
    return True


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replaces a file. Readers and a crash find the old content or the new one, and never a part.

    Raises:
        OSError: The file can't be written. The old one stays.
    """
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}{UNFINISHED}")
    create_file(new, content, mode)
    try:
        new.replace(path)
    except OSError:
        new.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Writes a directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, *, is_secret: bool) -> bytes:
    """The content of a file of ours.

    Args:
        path: The file.
        is_secret: Whether no other user may have been able to read it.

    Raises:
        StartError: Others own the file, or could change it, or could read the secret.
        OSError: It can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise StartError(
                f"{path} is not a file of this user: give the file to this user with chown, or restore it "
                "from a backup"
            )
        if is_secret and found.st_mode & 0o077:
            raise StartError(
                f"other users may read {path}: run `chmod 600 {path}`; if another user has read it, replace "
                "the secret (docs/security.md)"
            )
        if found.st_mode & 0o022:
            raise StartError(f"other users may change {path}: check its content, and run `chmod 644 {path}`")
        return file.read(FILE_LIMIT_BYTES)
