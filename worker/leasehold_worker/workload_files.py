"""A workload's files on its host, of which the workload itself can replace every one.

A pipe in the place of a file would block whoever opens it, and a link would show or change a file of somebody
else. So only regular files are opened, and no link is followed.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

OUTPUT_FILE: Final = "output.log"
WORKING_FOLDER: Final = "work"
"""Where a program starts that names no directory: apart from what its launcher and the worker write."""

MODE: Final = 0o600


class NotRegularError(OSError):
    """A link, a pipe, a folder or a device is in the place of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "no regular file", str(path))


def read_regular(path: Path, limit_bytes: int, offset: int = 0) -> bytes:
    """Bytes of a regular file, as many as there are.

    Raises:
        NotRegularError: It is something else.
        OSError: It can't be read.
    """
    descriptor = _open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, limit_bytes, offset)
    finally:
        os.close(descriptor)


def open_output(folder: Path) -> int:
    """Opens a workload's output behind what is there. The folder is made where it is missing.

    Raises:
        NotRegularError: Something else is in its place.
        OSError: It can't be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / WORKING_FOLDER).mkdir(mode=0o700, exist_ok=True)
    return _open(folder / OUTPUT_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


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
