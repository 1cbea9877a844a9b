"""Bounds of what workloads write: the length of an output on disk, and how long the files of ended ones stay.

Programs write to their output themselves, also while no worker runs. So the oldest part of an output that is
too long is taken out of the file as a hole: writers and readers go on at the same place.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import trio

from leasehold_worker.files.folder_trees import remove_tree
from leasehold_worker.files.workload_files import open_regular

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 2.0
DEFAULT_LIMIT_BYTES: Final = 128 * 2**20
BLOCK_BYTES: Final = 4096
_PUNCH_HOLE_KEEP_SIZE: Final = 0x03
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE (linux/falloc.h)."""


_removals: Final = trio.CapacityLimiter(4)
"""Folders that are removed at once, those included whose disk does not answer."""


async def bound_outputs(paths: Callable[[], Collection[Path]], limit_bytes: int) -> None:
    """Keeps outputs below a limit, until cancelled. A disk that does not answer holds up nothing else.

    Args:
        paths: The outputs of workloads that have not ended.
        limit_bytes: What each may take on disk. It may be exceeded for some seconds.
    """
    limiter = trio.CapacityLimiter(1)
    refused: set[Path] = set()
    while True:
        await trio.sleep(LOOK_INTERVAL_S)
        for path in paths():
            try:
                await trio.to_thread.run_sync(
                    shorten, path, limit_bytes, abandon_on_cancel=True, limiter=limiter
                )
            except FileNotFoundError:
                continue
            except OSError as error:
                if path not in refused:
                    refused.add(path)
                    logger.warning("the output %s can't be shortened: %s", path, error.strerror)
        refused &= set(paths())


def shorten(path: Path, limit_bytes: int) -> None:
    """Takes the oldest part out of a file that has more than the limit on disk: half of the limit stays.

    Raises:
        OSError: It is no regular file, or its file system has no holes.
    """
    with open_regular(path, os.O_WRONLY) as descriptor:
        found = os.fstat(descriptor)
        if found.st_blocks * 512 <= limit_bytes:
            return
        dropped = (found.st_size - limit_bytes // 2) // BLOCK_BYTES * BLOCK_BYTES
        if dropped > 0:
            _punch(descriptor, dropped)


def _punch(descriptor: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    offsets = (ctypes.c_int64(0), ctypes.c_int64(length))
    if libc.fallocate64(descriptor, _PUNCH_HOLE_KEEP_SIZE, *offsets):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


async def remove_folder(folder: Path) -> None:
    """Removes the files of a workload that is forgotten. What can't be removed stays, and is logged."""
    try:
        await trio.to_thread.run_sync(remove_tree, folder, abandon_on_cancel=True, limiter=_removals)
    except FileNotFoundError:
        pass  # claims have no folder
    except OSError as error:
        logger.warning("the files %s of an ended workload can't be removed: %s", folder, error.strerror)
