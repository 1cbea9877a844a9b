"""CRIU's working directory beside an image, for its log and statistics, which belong to no image."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from leasehold_worker.checkpoints.folders import WORK_SUFFIX
from leasehold_worker.criu.rpc import SwrkError

ERRORS_FILE: Final = "stderr.log"
"""File for CRIU's errors before it opens its log."""


def working_directory(image: Path) -> Path:
    """CRIU's working directory for an image."""
    return image.with_name(image.name + WORK_SUFFIX)


@contextmanager
def open_directories(image: Path, work: Path) -> Iterator[tuple[int, int, int]]:
    """Creates an empty working directory.

    Yields:
        Descriptors of the image, of the working directory, and of a file in it for early errors.

    Raises:
        SwrkError: The directories can't be created or opened.
    """
    with ExitStack() as stack:

        def opened(path: Path, flags: int) -> int:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            return descriptor

        try:
            work.mkdir()
            descriptors = (
                opened(image, os.O_RDONLY | os.O_DIRECTORY),
                opened(work, os.O_RDONLY | os.O_DIRECTORY),
                opened(work / ERRORS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            )
        except OSError as error:
            raise SwrkError(f"its directories can't be opened ({error})") from error
        yield descriptors
