"""Replacement of small private files. All calls block."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

MODE: Final = 0o600


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file that only the worker's user can read. The file is on disk before this returns.

    A crash or an error leaves the former file or the new one. A file has one writer at a time. The client's
    twin is ``leasehold_client.private_files``, since neither package may import the other one.

    Raises:
        OSError: The file can't be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # of a crash
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, MODE)
            file.write(data)
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
