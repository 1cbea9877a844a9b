"""Folders of workloads, created with their first file and removed once empty."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FOLDER_MODE: Final = 0o700
_ATTEMPTS: Final = 10

Made = TypeVar("Made")


def make_inside(folder: Path, make: Callable[[], Made]) -> Made:
    """Creates a file or folder inside a folder, and creates that first; again if it is removed meanwhile.

    Raises:
        OSError: One of them can't be created.
    """
    for _ in range(_ATTEMPTS):
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return make()
    return make()


def remove_if_empty(folder: Path) -> None:
    """Removes a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


WORK_SUFFIX: Final = ".work"


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns errors of files into refusals.

    Raises:
        OperationError: INSUFFICIENT_DISK, or PERMISSION_OR_OS.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OperationError(
                errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
                f"the disk of {folder} is full ({error.strerror}): delete checkpoints, or give the worker "
                "another image directory",
            ) from error
        raise OperationError(
            errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
            f"a checkpoint in {folder} can't be read or written ({error.strerror}): check the "
            "disk, and the owner of the folder",
        ) from error
