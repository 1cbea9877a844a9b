"""A volume on which every access waits, as on a network volume whose server is gone."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MNT_FORCE, MNT_DETACH = 1, 2

WATCHDOG = f"""
import ctypes, os, sys, time
time.sleep(20)
ctypes.CDLL(None).umount2(os.fsencode(sys.argv[1]), {MNT_FORCE})
"""
"""Ends what waits, if the test does not. A process that waits for such a volume can't be killed."""


@contextmanager
def dead_volume(path: Path, more_options: str = "") -> Iterator[None]:
    """Mounts a FUSE file system of which nobody answers any request. At the end all requests fail."""
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir(exist_ok=True)
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    options = f"fd={descriptor},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    options += more_options
    if libc.mount(b"none", os.fsencode(path), b"fuse", 0, options.encode()):
        os.close(descriptor)
        pytest.skip(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
    with subprocess.Popen([sys.executable, "-c", WATCHDOG, path]) as watchdog:
        try:
            yield
        finally:
            libc.umount2(os.fsencode(path), MNT_FORCE)
            os.close(descriptor)
            libc.umount2(os.fsencode(path), MNT_DETACH)
            watchdog.kill()
