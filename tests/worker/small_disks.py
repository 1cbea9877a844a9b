"""A small disk, which a test can fill."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MNT_DETACH = 2


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mounts a file system of 64 KiB on a directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=64k"):
        pytest.skip(f"no file systems can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(path), MNT_DETACH)


def fill(path: Path) -> None:
    """Takes all free space of a disk by a file in it."""
    with suppress(OSError), (path / "filling").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))
