"""Paths that a loader of settings files must refuse."""

import os
from pathlib import Path

UNREADABLE = ("fifo", "device", "large")


def make_unreadable(file: Path, kind: str) -> None:
    """Makes a FIFO, a device that never ends, or a sparse file of 1 TiB at this path."""
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as empty:
            empty.truncate(2**40)
