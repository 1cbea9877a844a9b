"""CRIU's working directory beside an image, for its log and statistics, which belong to no image."""

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from leasehold_worker.checkpoints.folders import WORK_SUFFIX
from leasehold_worker.checkpoints.volume_calls import call_volume, end_in_time
from leasehold_worker.criu.rpc import SwrkError

ERRORS_FILE: Final = "stderr.log"
"""File for CRIU's errors before it opens its log."""


def working_directory(image: Path, attempt: str = "") -> Path:
    """CRIU's working directory for an image.

    Args:
        image: The folder of the image.
        attempt: Keeps a restore apart from earlier ones, whose directories may still be removed.
    """
    name = f"{image.name}.{attempt}" if attempt else image.name
    return image.with_name(name + WORK_SUFFIX)


@asynccontextmanager
async def open_directories(
    image: Path, work: Path, *, is_shared: bool = False
) -> AsyncIterator[tuple[int, int, int]]:
    """Creates an empty working directory. Opens and closes in a thread: the volume may not answer.

    Args:
        image: The folder of the image.
        work: The working directory.
        is_shared: Whether the descriptor of the image gets a shared lock, which keeps the working directory
            from being swept.

    Yields:
        Descriptors of the image, of the working directory, and of a file in it for early errors.

    Raises:
        SwrkError: The directories can't be created or opened.
        OperationError: STORAGE_UNAVAILABLE: the volume does not answer in time.
    """
    try:
        # A late directory stays until the worker's next start.
        descriptors = await call_volume(_open, image, work, is_shared, undo=_close)
    except OSError as error:
        raise SwrkError(f"its directories can't be opened ({error})") from error
    try:
        yield descriptors
    finally:
        await end_in_time(partial(_close, descriptors))


def _open(image: Path, work: Path, is_shared: bool) -> tuple[int, int, int]:
    with ExitStack() as undone:

        def opened(path: Path, flags: int) -> int:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
            undone.callback(os.close, descriptor)
            return descriptor

        work.mkdir()
        descriptors = (
            opened(image, os.O_RDONLY | os.O_DIRECTORY),
            opened(work, os.O_RDONLY | os.O_DIRECTORY),
            opened(work / ERRORS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        )
        if is_shared:
            fcntl.flock(descriptors[0], fcntl.LOCK_SH)
        undone.pop_all()
        return descriptors


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
