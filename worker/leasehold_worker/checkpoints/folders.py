"""Folders of workloads, which are made when something is put there and removed once they are empty."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

FOLDER_MODE: Final = 0o700
_ATTEMPTS: Final = 10

Made = TypeVar("Made")


def make_inside(folder: Path, make: Callable[[], Made]) -> Made:
    """Makes something in a folder, which is made before; again where somebody removes that in between.

    Raises:
        OSError: One of them can't be made.
    """
    for _ in range(_ATTEMPTS):
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return make()
    return make()


def remove_if_empty(folder: Path) -> None:
    """Removes a folder, unless there is something in it."""
    with suppress(OSError):
        folder.rmdir()
