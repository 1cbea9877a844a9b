"""Opens files in a folder that others may write to: only regular ones, without ever blocking."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor for reading a regular file. A link or a pipe in its place is refused: it may never end.

    Raises:
        OSError: The file can't be opened, or is not regular.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def is_tellable(moment: datetime) -> bool:
    """Whether a time is representable: with a time zone it may lie beyond the years 1 to 9999."""
    try:
        moment.astimezone(UTC)
    except OverflowError:
        return False
    return True


def time_of(seconds: float) -> datetime:
    """A file's time, or the nearest representable one."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)
