"""A workload's files on its host, each of which the workload itself can replace.

A pipe in place of a file would block its reader, and a link would expose or change another user's file. So
only regular files are opened, and no link is followed.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from leasehold_worker.errors import invalid

OUTPUT_FILE: Final = "output.log"
WORKING_FOLDER: Final = "work"
"""Default working directory of a program, apart from the files of its launcher and the worker."""

USER_FOLDERS: Final = "users"
"""Parent of the folders that belong to the Unix users of workloads, beside the worker's own folders."""

MODE: Final = 0o600
OUTPUT_MODE: Final = 0o660
"""Of an output that a Unix user of its own writes, as the file's group."""

_FOLDER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class NotRegularError(OSError):
    """A link, a pipe, a folder or a device is in the place of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, limit_bytes: int, offset: int = 0) -> bytes:
    """Bytes of a regular file, as many as there are.

    Raises:
        NotRegularError: The file is not regular.
        OSError: The file can't be read.
    """
    with open_regular(path, os.O_RDONLY) as descriptor:
        return os.pread(descriptor, limit_bytes, offset)


def read_kept(path: Path, limit_bytes: int, offset: int) -> tuple[int, bytes]:
    """Bytes of an output whose oldest part may be a hole, and their start: not before the offset.

    Args:
        path: The file.
        limit_bytes: Most bytes.
        offset: The earliest start. Negative: so many bytes before the end.

    Raises:
        NotRegularError: The file is not regular.
        OSError: The file can't be read.
    """
    with open_regular(path, os.O_RDONLY) as descriptor:
        if offset < 0:
            offset = max(0, os.fstat(descriptor).st_size + offset)
        try:
            offset = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data at or after the offset
                return offset, b""
            if error.errno != errno.EINVAL:  # the file system does not support SEEK_DATA
                raise
        return offset, os.pread(descriptor, limit_bytes, offset)


def require_folder_name(workload_id: str) -> None:
    """Refuses a workload id that can't name a folder.

    Raises:
        OperationError: INVALID_ARGUMENT.
    """
    if not _FOLDER_NAME.fullmatch(workload_id):
        raise invalid(
            "workload_id",
            f"invalid workload id {workload_id[:128]!r}: use 1 to 128 letters, digits, '-', '_' or '.', and "
            "start with a letter or digit",
        )


def open_output(folder: Path, working_folder: Path, owner: tuple[int, int] | None = None) -> int:
    """Opens a workload's output for appending. Missing folders are created.

    The output is in the worker's folder, so its Unix user can't replace it by a link or a pipe. The user's
    group may write to the file, and so open it again, as ``/dev/stdout``. An owner could also forbid the
    worker to read the output and to bound its size.

    Args:
        folder: The worker's folder of the workload.
        working_folder: The default working directory of its program.
        owner: The user and group ids of its Unix user. None: the worker's own.

    Raises:
        NotRegularError: The path is not a regular file.
        OSError: The file can't be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if owner is None:
        working_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        _make_folder_of(working_folder, *owner)
    descriptor = _open(folder / OUTPUT_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if owner is not None:
        os.fchown(descriptor, -1, owner[1])
        os.fchmod(descriptor, OUTPUT_MODE)
    return descriptor


def _make_folder_of(folder: Path, uid: int, gid: int) -> None:
    """Makes a folder for a user. An existing one is left alone: its user can mount a volume there that hangs.

    Only the worker can make entries in the parent, so an existing folder is of an earlier start.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return
    os.chown(folder, uid, gid, follow_symlinks=False)


@contextmanager
def open_regular(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a regular file.

    Raises:
        NotRegularError: The file is not regular.
        OSError: The file can't be opened.
    """
    descriptor = _open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a pipe or socket, a folder
            raise NotRegularError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(path)
    os.set_blocking(descriptor, True)
    return descriptor
