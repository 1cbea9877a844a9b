"""The worker's own keys: for secret variables of workloads at rest, and for MACs of process images."""

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from leasehold_worker.errors import StartError
from leasehold_worker.files.file_replacement import replace_file
from leasehold_worker.files.private_directories import open_private

FILE: Final = "environment.key"
IMAGES_FILE: Final = "images.key"
KEY_BYTES: Final = 32


def open_key(directory: Path, name: str = FILE) -> bytes:
    """A key in a directory of the state directory, apart from the journal. Created if it is missing.

    Raises:
        StartError: The key is damaged or can't be read, or another user could read or replace it.
    """
    path = directory / name
    try:
        open_private(directory, "directory of keys")
        if not path.exists():
            replace_file(path, secrets.token_bytes(KEY_BYTES))
        return _read(path)
    except OSError as error:
        raise StartError(
            f"the key {path} can't be created or read ({error.strerror}): repair that, or choose another "
            "directory with --state-dir"
        ) from error


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        is_ours = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        key = file.read(KEY_BYTES + 1)
    if not is_ours or not stat.S_ISREG(found.st_mode) or len(key) != KEY_BYTES:
        raise StartError(
            f"{path} is not a key of {KEY_BYTES} bytes that only the worker's user can read: restore it from "
            "a backup, or delete it, which loses what it protects"
        )
    return key
