"""Private directories, in which no other user may read or change the worker's files.

A user who may write to a directory can replace a file by a link or a pipe. So a directory that another user
owns or could rename is refused before a file in it is opened.
"""

import os
import stat
from pathlib import Path
from typing import Final

from leasehold_worker.errors import StartError

PRIVATE: Final = 0o700
PASSABLE: Final = 0o711
"""Other users reach known names, such as a socket, and can't list the directory."""

UMASK: Final = 0o077
"""The worker's umask. Programs that it starts get the umask of the worker's start."""


def _umask() -> int:
    """The umask of this process, which umask(2) reports only when it changes it."""
    mask = os.umask(UMASK)
    os.umask(mask)
    return mask


STARTED_WITH: Final = _umask()
"""The umask at the worker's start."""


def open_private(path: Path, purpose: str, mode: int = PRIVATE) -> None:
    """Creates a missing directory, and removes the permissions of other users, as both functions below."""
    create_private(path, purpose, mode)
    close_to_others(path, purpose, mode)


def create_private(path: Path, purpose: str, mode: int = PRIVATE) -> None:
    """Creates a missing directory, and changes nothing of an existing one.

    Args:
        path: The directory.
        purpose: Its purpose, for messages.
        mode: Its permissions.

    Raises:
        StartError: Another user owns the directory or can replace it. It is the root directory.
        OSError: The directory can't be created or read.
    """
    if os.path.realpath(path) == "/":  # the host is unusable without the permissions of others
        raise StartError(f"the {purpose} {path} is the root directory: choose another directory")
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    require_private(path, purpose)


def close_to_others(path: Path, purpose: str, mode: int = PRIVATE, passable: str = "") -> None:
    """Gives a directory its permissions, and removes those of other users on its entries.

    Args:
        path: The directory.
        purpose: Its purpose, for messages.
        mode: Its permissions.
        passable: The entry that other users may pass through, such as running workloads. Empty: none.

    Raises:
        StartError: Another user owns an entry.
        OSError: The directory can't be read.
    """
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)
    with os.scandir(path) as entries:
        for entry in entries:
            _require_ours(Path(entry.path), purpose, os.geteuid())
            _close(entry, PASSABLE if entry.name == passable else PRIVATE)


def _close(entry: os.DirEntry[str], kept: int) -> None:
    """Removes other users' permissions on a file or a directory, but for some. Sockets are left alone."""
    found = entry.stat(follow_symlinks=False)
    mode = stat.S_IMODE(found.st_mode)
    is_kept = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    if is_kept and found.st_uid == os.geteuid() and mode & ~kept & 0o077:
        os.chmod(entry.path, mode & kept)


def make_user_folders(path: Path) -> None:
    """Creates the parent of folders that belong to Unix users of workloads. They can pass, but not list it.

    Raises:
        StartError: The users can't pass through a parent.
        OSError: The directory can't be created.
    """
    path.mkdir(mode=PASSABLE, exist_ok=True)
    path.chmod(PASSABLE)
    for part in path.absolute().resolve().parents:
        if not part.stat().st_mode & stat.S_IXOTH:
            raise StartError(
                f"run_as is set, and other users can't pass through {part} to their workloads' folders: "
                "choose another directory with --state-dir, or permit it (chmod o+x)"
            )


def require_private(
    path: Path, purpose: str, *, may_be_roots: bool = False, owner_uid: int | None = None
) -> None:
    """Refuses a directory that another user than the worker's and root could replace or write to.

    Args:
        path: The existing directory.
        purpose: Its purpose, for messages.
        may_be_roots: Root may own it, even if the worker is not root.
        owner_uid: The worker's user. None: that of this process.

    Raises:
        StartError: A part of the path has another owner.
        OSError: The path can't be read.
    """
    ours = os.geteuid() if owner_uid is None else owner_uid
    absolute = path.absolute()
    for part in (absolute, *absolute.parents):
        _require_ours(part, purpose, ours)
    resolved = absolute.resolve()
    for part in (resolved, *resolved.parents):
        _require_ours(part, purpose, ours)
        mode = part.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StartError(
                f"every user can write to {part}, and so replace the {purpose} {path}: remove "
                "that permission (chmod o-w), or choose another directory"
            )
    uid = resolved.stat().st_uid
    if uid != ours and not (may_be_roots and uid == 0):
        raise _foreign(resolved, uid, purpose, ours)


def _require_ours(path: Path, purpose: str, ours: int) -> None:
    uid = path.lstat().st_uid
    if uid not in (0, ours):
        raise _foreign(path, uid, purpose, ours)


def _foreign(path: Path, uid: int, purpose: str, ours: int) -> StartError:
    return StartError(
        f"{path} of the {purpose} belongs to user id {uid}, and the worker runs as {ours}: choose "
        f"another directory, or give it to the worker's user (chown {ours} {path})"
    )
