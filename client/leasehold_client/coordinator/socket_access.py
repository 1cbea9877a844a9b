"""Why a user may not open the socket of a coordinator, and who may."""

import grp
import os
import pwd
import stat
from pathlib import Path


def closed_socket_text(path: Path) -> str:
    """A sentence about a connection that was refused with EACCES: what happened, why, and what to do."""
    closed, found = _closed_part(path)
    what = "the socket" if closed == path else f"the directory {closed}"
    caller = _user_name(os.geteuid())
    owner, group = _user_name(found.st_uid), _group_name(found.st_gid)
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    return (
        f"user {caller} may not use the coordinator's socket {path}: {what} belongs to user {owner} and "
        f"group {group}, with mode {mode}; call as {owner}, or name the coordinator's HOST:PORT with "
        "--coordinator"
    )


def _closed_part(path: Path) -> tuple[Path, os.stat_result]:
    """The first part of a path that is closed to this user: a directory, or the socket itself."""
    for part in reversed(path.parents):
        if not os.access(part, os.X_OK, effective_ids=True):
            return part, part.stat()
    try:
        return path, path.stat()
    except OSError:  # it was removed since
        return path.parent, path.parent.stat()


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
