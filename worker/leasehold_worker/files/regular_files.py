"""Opening files of a folder that others may write to: only regular files, and never waiting for one."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file. A link or a pipe in its place is refused: it may never end.

    Raises:
        OSError: It can't be opened, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def is_tellable(moment: datetime) -> bool:
    """Whether a time can be told: one with a time zone may lie beyond the years 1 to 9999."""
    try:
        moment.astimezone(UTC)
    except OverflowError:
        return False
    return True


def time_of(seconds: float) -> datetime:
    """A file's time, or the nearest that can be told."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)
