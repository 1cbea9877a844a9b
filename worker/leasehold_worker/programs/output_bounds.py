"""Bounds of workloads' files: the size of an output on disk, and the number of kept folders.

Programs write to their output themselves, even while no worker runs. So the oldest part of a large output
becomes a hole in the file: writers and readers continue at the same place.
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
from leasehold_worker.host.accounts import Account
from leasehold_worker.programs.user_files import UserFileError, empty_as
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 2.0
REMOVAL_TIMEOUT_S: Final = 600.0
"""Time for a Unix user to empty the folder of its workload, which its processes may fill meanwhile."""

DEFAULT_LIMIT_BYTES: Final = 128 * 2**20
BLOCK_BYTES: Final = 4096
_PUNCH_HOLE_KEEP_SIZE: Final = 0x03
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE (linux/falloc.h)."""


_removals: Final = trio.CapacityLimiter(4)
"""Folders that are removed at once, including those whose disk hangs."""


async def bound_outputs(paths: Callable[[], Collection[Path]], limit_bytes: int) -> None:
    """Keeps outputs below a limit, until cancelled. A disk that hangs delays no other one.

    Args:
        paths: The outputs of workloads that have not ended.
        limit_bytes: Limit of each on disk. It may be exceeded for some seconds.
    """
    limiter = trio.CapacityLimiter(1)
    refused: set[Path] = set()
    while True:
        await trio.sleep(LOOK_INTERVAL_S)
        for path in paths():
            try:
                await run_in_thread(shorten, path, limit_bytes, abandon_on_cancel=True, limiter=limiter)
            except FileNotFoundError:
                continue
            except OSError as error:
                if path not in refused:
                    refused.add(path)
                    logger.warning("the output %s can't be shortened: %s", path, error.strerror)
        refused &= set(paths())


def shorten(path: Path, limit_bytes: int) -> None:
    """Frees the oldest part of a file beyond the limit: half of the limit stays.

    Raises:
        OSError: The file is not regular, or its file system has no holes.
    """
    with open_regular(path, os.O_WRONLY) as descriptor:
        found = os.fstat(descriptor)
        if found.st_blocks * 512 <= limit_bytes:
            return
        dropped = (found.st_size - limit_bytes // 2) // BLOCK_BYTES * BLOCK_BYTES
        if dropped > 0:
            _punch(descriptor, dropped)
        else:  # the program has reserved blocks beyond the end, by fallocate(2)
            os.ftruncate(descriptor, found.st_size)


def _punch(descriptor: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    offsets = (ctypes.c_int64(0), ctypes.c_int64(length))
    if libc.fallocate64(descriptor, _PUNCH_HOLE_KEEP_SIZE, *offsets):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


async def remove_folders(folder: Path, user_folder: Path, account: Account | None) -> None:
    """Removes the files of a forgotten workload. A failure is logged.

    Args:
        folder: The worker's folder.
        user_folder: The folder of its Unix user, who empties it. The worker does not even open it.
        account: The Unix user. None: the worker's own, and there is no such folder.
    """
    if account is not None:
        try:
            await empty_as(account, user_folder, REMOVAL_TIMEOUT_S)
            await run_in_thread(
                user_folder.rmdir, abandon_on_cancel=True, limiter=_removals
            )  # refused for a mount point
        except FileNotFoundError:
            pass  # the worker did not start the program
        except (OSError, UserFileError) as error:
            logger.warning("the files %s of an ended workload can't be removed: %s", user_folder, error)
    try:
        await run_in_thread(remove_tree, folder, abandon_on_cancel=True, limiter=_removals)
    except FileNotFoundError:
        pass  # claims have no folder
    except OSError as error:
        logger.warning("the files %s of an ended workload can't be removed: %s", folder, error.strerror)
