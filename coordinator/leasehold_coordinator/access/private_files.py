"""Private files of the state directory.

They are created whole or not at all, and read only if no other user could change them.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from leasehold_coordinator.errors import StartError

FILE_LIMIT_BYTES: Final = 65_536


def open_directory(directory: Path) -> None:
    """Creates a missing state directory.

    Raises:
        StartError: Another user could replace files in it.
        OSError: It can't be created.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise StartError(
            f"other users may change {directory}: make it yours with mode 0700, or choose another with "
            "--state-dir"
        )


def create_file(path: Path, content: bytes, mode: int = 0o600) -> bool:
    """Creates a file, unless it exists. Nobody ever sees a part of it, also after a crash.

    Returns:
        Whether this call created it. Another coordinator of this user may have been first.
    """
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.link(new, path)
    except FileExistsError:
        return False
    finally:
        new.unlink()
    return True


def read_file(path: Path, *, is_secret: bool) -> bytes:
    """The content of a file of ours.

    Args:
        path: The file.
        is_secret: Whether no other user may have been able to read it.

    Raises:
        StartError: Others own the file, or could change it, or could read the secret.
        OSError: It can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        refused = 0o077 if is_secret else 0o022
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & refused:
            mode = "0600" if is_secret else "0644"
            raise StartError(
                f"{path} is not a file of yours with mode {mode}: delete it, and a new one is made"
            )
        return file.read(FILE_LIMIT_BYTES)
