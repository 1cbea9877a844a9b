"""Files that are replaced as a whole, so that a reader or a crash never finds a part."""

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replaces a file. It is on disk before this returns, whole or not at all. Callers exclude each other.

    The worker's twin is ``leasehold_worker.files.file_replacement``, since neither package may import the
    other one.

    Args:
        path: The file.
        content: Its new content.
        mode: Its permissions, whatever the umask is.

    Raises:
        OSError: The file can't be written. The old one stays.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # of a killed process
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(fresh, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):  # of a broken disk, whose first error counts
            fresh.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
