"""The driver helper's access to processes of other users. The helper starts often: no trio here.

The driver opens a pipe of its target through /proc/PID/fd. The pipe has mode 0600 and belongs to the target's
file-system user, so the right to trace (CAP_SYS_PTRACE) is not enough. Without access to the pipe, every call
but GetRestoreThreadId answers OPERATING_SYSTEM (seen on 580.159.04 with an H100).

CAP_DAC_OVERRIDE would do, and was rejected: with that capability, the helper would also open any file that a
hostile target puts in the place of its pipe. So a helper of root gives it up for the time of a call, too.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from leasehold_worker.host.capabilities import DAC_OVERRIDE, SETUID, is_effective
from leasehold_worker.host.process_folders import PROC, facts_folder

_NO_USER: Final = 2**32 - 1
"""Never a user id: setfsuid(2) changes nothing and returns the present file-system user."""

_libc: Final = ctypes.CDLL(None)


@contextmanager
def file_system_user_of(pid: int, on_change: Callable[[], None]) -> Iterator[None]:
    """Makes this thread the file-system user of a process, if that is needed and possible.

    Needed: the process has another file-system user. Possible: this thread has CAP_SETUID. Real and effective
    user stay, so the other user can neither signal nor trace this process. A change that fails is no error
    here: the driver's call fails, and :func:`obstacle` says why.

    Each change makes this process undumpable and clears its signal at the parent's death (PR_SET_PDEATHSIG in
    prctl(2)). A change from or to root also removes or restores effective capabilities for files
    (capabilities(7)); CAP_SYS_PTRACE and CAP_SETUID stay.

    Args:
        pid: The process.
        on_change: Called after each change, to set the signal at the parent's death again.
    """
    own, wanted = _file_system_user(), file_system_user(pid)
    if wanted in (None, own) or not is_effective(SETUID):
        yield
        return
    try:
        _libc.setfsuid(ctypes.c_uint32(wanted))
        on_change()
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint32(own))
        on_change()


def file_system_user(pid: int) -> int | None:
    """The file-system user id of a process, which owns its pipes. None: there is no such process."""
    try:
        status = (PROC / str(pid) / "status").read_bytes()
    except OSError:
        return None
    for line in status.split(b"\n"):
        if line.startswith(b"Uid:"):
            return int(line.split()[4])
    return None


def obstacle(pid: int) -> str | None:
    """Why the driver's calls on a process would be refused in this thread, with the remedy. None: no reason.

    The kernel makes the same checks when the process's memory is opened for writing: the right to trace, with
    Yama and capabilities (ptrace(2)), and the permissions of a file with mode 0600 of the same user.
    """
    folder = facts_folder(pid)
    try:
        os.close(os.open(folder / "mem", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return _why_closed(pid, folder) or (
            f"tracing it is not permitted ({error.strerror}): run the worker as root or with CAP_SYS_PTRACE, "
            "or as the user of the process with kernel.yama.ptrace_scope=0"
        )
    return None


def _why_closed(pid: int, folder: Path) -> str | None:
    """Why the files of a process are closed to this thread, with the remedy. None: they are not."""
    try:
        owner = os.stat(folder / "mem").st_uid
    except OSError:
        return None
    if owner == _file_system_user() or is_effective(DAC_OVERRIDE):
        return None
    if owner != file_system_user(pid):
        return (
            f"it is not dumpable (prctl(2)), so its files in /proc belong to user id {owner}: have it "
            "execute its program after it has changed its user, and leave it dumpable"
        )
    return (
        f"it belongs to user id {owner}: run the worker as root, with CAP_SYS_PTRACE and CAP_SETUID, or as "
        "the user of the process"
    )


def _file_system_user() -> int:
    """The file-system user id of this thread. setfsuid(2) reports no success, so this is its only check."""
    return ctypes.c_uint32(_libc.setfsuid(ctypes.c_uint32(_NO_USER))).value
