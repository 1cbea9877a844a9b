"""Small tasks on files of a workload's Unix user, in a child that has become this user.

``USER read PATH LIMIT`` writes the content of a regular file to standard output. ``USER measure FOLDER``
writes the disk usage below a folder in bytes. ``USER empty FOLDER`` removes the content of a folder, if there
is one. A link in place of a folder is refused. An error is one line on standard error, and the status 1.

``USER connect HOST PORT TIMEOUT_S FD`` sends a TCP connection through the Unix socket FD. To the kernel, it
is the user's.

The child has the rights of the workload's user and no others. So no link, pipe or rename of the workload
makes it touch a file that this user can't touch. A file system that hangs blocks nothing but the child.
"""

import encodings.idna  # noqa: F401 - for getaddrinfo, as the user may be unable to read the interpreter's files
import errno
import os
import resource
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

from leasehold_worker.files.folder_trees import directory_bytes, empty_folder
from leasehold_worker.programs.user_change import take_on

MEMORY_LIMIT_BYTES = 1 << 30
"""Address space of the child: a folder of the user may have any number of entries."""

READ, MEASURE, EMPTY, CONNECT = "read", "measure", "empty", "connect"


def main() -> None:
    """Performs the task of the arguments."""
    user, task, path, *more = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    try:
        take_on(user)
        match task:
            case "read":
                os.write(1, read(path, int(more[0])))
            case "measure":
                os.write(1, b"%d" % directory_bytes(Path(path)))
            case "connect":
                connect(path, *more)
            case "empty":
                with suppress(FileNotFoundError):
                    empty_folder(Path(path))
            case _:
                raise ValueError(f"unknown task {task}")
    except (OSError, ValueError, MemoryError) as error:
        os.write(2, str(getattr(error, "strerror", None) or error or "too many entries").encode())
        sys.exit(1)


def read(path: str, limit_bytes: int) -> bytes:
    """The first bytes of a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.read(descriptor, limit_bytes)
    finally:
        os.close(descriptor)


def connect(host: str, port: str, timeout_s: str, descriptor: str) -> None:
    """Connects, and hands the connection over."""
    with (
        socket.socket(fileno=int(descriptor)) as to_worker,
        socket.create_connection((host, int(port)), float(timeout_s)) as connection,
    ):
        socket.send_fds(to_worker, [b"c"], [connection.fileno()])
