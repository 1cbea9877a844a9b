"""Directories of which no other user may read or change what the worker keeps there.

Whoever may write to a directory can put a link or a pipe in the place of a file. So a directory that somebody
else owns, or that lies where somebody else can rename it, is refused before anything in it is opened.
"""

import os
import stat
from pathlib import Path
from typing import Final

from leasehold_worker.errors import StartError

PRIVATE: Final = 0o700
PASSABLE: Final = 0o711
"""Other users reach what they know the name of, such as a socket, and can't list the directory."""

UMASK: Final = 0o077
"""Of the worker. Programs that it starts get the umask that the worker was started with."""


def _umask() -> int:
    """The umask of this process, which umask(2) tells only to who changes it."""
    mask = os.umask(UMASK)
    os.umask(mask)
    return mask


STARTED_WITH: Final = _umask()
"""The umask with which the worker was started."""


def open_private(path: Path, purpose: str, mode: int = PRIVATE) -> None:
    """Makes a directory where it is missing, and takes away what other users may do there.

    Args:
        path: The directory.
        purpose: What it is, for messages.
        mode: Its permissions.

    Raises:
        StartError: Somebody else owns it or an entry of it, or can put another in its place.
        OSError: It can't be made or read.
    """
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    require_private(path, purpose)
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)
    with os.scandir(path) as entries:
        for entry in entries:
            _require_ours(Path(entry.path), purpose)
            _close(entry)


def _close(entry: os.DirEntry[str]) -> None:
    """Takes away what other users may do with a file or a directory of ours. Sockets are for others."""
    found = entry.stat(follow_symlinks=False)
    mode = stat.S_IMODE(found.st_mode)
    is_kept = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    if is_kept and found.st_uid == os.geteuid() and mode & 0o077:
        os.chmod(entry.path, mode & PRIVATE)


def require_private(path: Path, purpose: str, *, may_be_roots: bool = False) -> None:
    """Refuses a directory that another user than the worker's and root could replace or write to.

    Args:
        path: The directory, which is there.
        purpose: What it is, for messages.
        may_be_roots: It may be root's, whoever the worker is.

    Raises:
        StartError: Which part of the path is whose, and the remedy.
        OSError: It can't be looked at.
    """
    absolute = path.absolute()
    for part in (absolute, *absolute.parents):
        _require_ours(part, purpose)
    resolved = absolute.resolve()
    for part in (resolved, *resolved.parents):
        _require_ours(part, purpose)
        mode = part.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StartError(
                f"every user can write to {part}, and so replace the {purpose} {path}: remove "
                "that permission (chmod o-w), or choose another directory"
            )
    uid = resolved.stat().st_uid
    if uid != os.geteuid() and not (may_be_roots and uid == 0):
        raise _foreign(resolved, uid, purpose)


def _require_ours(path: Path, purpose: str) -> None:
    uid = path.lstat().st_uid
    if uid not in (0, os.geteuid()):
        raise _foreign(path, uid, purpose)


def _foreign(path: Path, uid: int, purpose: str) -> StartError:
    return StartError(
        f"{path} of the {purpose} belongs to user id {uid}, and the worker runs as {os.geteuid()}: choose "
        f"another directory, or give it to the worker's user (chown {os.geteuid()} {path})"
    )
