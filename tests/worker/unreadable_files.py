"""A file on a damaged disk."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MS_BIND, MNT_DETACH = 4096, 2


def require_bind_mounts(folder: Path) -> None:
    """Skips the test where they are not permitted. A test that has started programs can't be skipped."""
    with unreadable(folder / "trial"):
        pass


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Has each read of a file fail with EIO, as a read of a process's memory at the address 0 does."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = os.fsencode(f"/proc/{os.getpid()}/mem")
    path.touch()
    if libc.mount(memory, os.fsencode(path), None, MS_BIND, None):
        pytest.skip(f"no bind mounts here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(path), MNT_DETACH)
