"""Trees of folders made by programs: of any depth, with paths too long to open.

The standard library's rmtree, walk and rglob recurse once per level, so a tree of a thousand levels ends them
with RecursionError.
"""

import errno
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

_BLOCK_BYTES: Final = 512
"""Unit of st_blocks, whatever the volume's own is (stat(2))."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path) -> None:
    """Removes a folder and its content. No link is followed.

    Raises:
        OSError: An entry can't be removed, and stays.
    """
    empty_folder(folder)
    folder.rmdir()


def empty_folder(folder: Path) -> None:
    """Removes the content of a folder. No link is followed.

    Each subfolder is moved up into the first one and emptied there, so two descriptors suffice. A mounted
    file system keeps its content: a program may have mounted its data in the folder.

    Raises:
        OSError: An entry can't be removed, and stays.
    """
    errors: dict[str, OSError] = {}
    top = os.open(folder, _FOLDER)
    try:
        _require_same_volume(top, os.stat(folder.parent).st_dev)
        while names := [name for name in os.listdir(top) if name not in errors]:
            for name in names:
                try:
                    _remove_entry(top, name)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    errors[name] = error
    finally:
        os.close(top)
    for first in errors.values():
        raise first


def discard_tree(folder: Path) -> None:
    """Like :func:`remove_tree`; entries that can't be removed stay."""
    with suppress(OSError):
        remove_tree(folder)


def _remove_entry(top: int, name: str) -> None:
    """Removes a file, or a folder after moving its own folders up."""
    try:
        os.unlink(name, dir_fd=top)
    except IsADirectoryError:
        inner = _open_folder(top, name)
        try:
            _require_same_volume(inner, os.fstat(top).st_dev)
            for child in os.listdir(inner):
                try:
                    os.unlink(child, dir_fd=inner)
                except IsADirectoryError:
                    os.rename(child, uuid.uuid4().hex, src_dir_fd=inner, dst_dir_fd=top)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)


def _open_folder(top: int, name: str) -> int:
    """Opens a folder, with its owner's permissions if it has none."""
    try:
        return os.open(name, _FOLDER, dir_fd=top)
    except PermissionError:
        place = os.open(name, _FOLDER | os.O_PATH, dir_fd=top)
        try:
            os.chmod(f"/proc/self/fd/{place}", 0o700)  # by its name, it could be a link by now
        finally:
            os.close(place)
        return os.open(name, _FOLDER, dir_fd=top)


def _require_same_volume(folder: int, device: int) -> None:
    if os.fstat(folder).st_dev != device:
        raise OSError(errno.EXDEV, "a file system is mounted in it: unmount it, then remove the rest")


def list_folders(folder: Path) -> list[str]:
    """The paths of the folder and of all its subfolders, parents first.

    Folders with paths too long to open are left out. The paths are strings, since pathlib is slow for deep
    ones.
    """
    found = [str(folder)]
    for path in found:
        with suppress(OSError), os.scandir(path) as entries:
            found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def directory_bytes(directory: Path) -> int:
    """Disk usage of the files below a directory. Slow for many files; deleted ones don't count."""
    total = 0
    for folder in list_folders(directory):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
    return total
