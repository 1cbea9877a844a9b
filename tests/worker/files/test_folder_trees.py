"""Folders that programs have made as deep as they could: they are measured and removed like others."""

import ctypes
import os
from pathlib import Path

import pytest
import trio
from leasehold_worker.files.folder_trees import directory_bytes, discard_tree, list_folders, remove_tree
from leasehold_worker.host.cgroup_files import KernelFiles
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.programs.output_bounds import remove_folders

from tests.worker.dead_volumes import MNT_DETACH

LEVELS = 1100
"""More than Python lets functions call themselves."""


def make_deep(folder: Path, levels: int = LEVELS, name: str = "d") -> Path:
    folder.mkdir()
    opened = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=opened)
        below = os.open(name, os.O_RDONLY, dir_fd=opened)
        os.close(opened)
        opened = below
    os.close(opened)
    return folder


@pytest.mark.parametrize(("levels", "name"), [(LEVELS, "d"), (25, "d" * 200)], ids=["levels", "characters"])
def test_a_deep_tree_is_measured_and_removed(tmp_path: Path, levels: int, name: str) -> None:
    folder = make_deep(tmp_path / "deep", levels, name)
    assert directory_bytes(folder) >= 0
    trio.run(remove_folders, folder, tmp_path / "none", None)
    assert not folder.exists()


def test_a_deep_control_group_is_removed(tmp_path: Path) -> None:
    group = make_deep(tmp_path / "workload-w")
    assert ResourceLimits(tmp_path, "", "", KernelFiles()).remove(group)
    assert not group.exists()


def test_a_tree_goes_with_all_that_is_in_it_and_nothing_that_links_lead_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    folder = tmp_path / "folder"
    (folder / "a/b/a").mkdir(parents=True)
    (folder / "b/a").mkdir(parents=True)
    for name in ("file", "a/b/file", "b/a/file"):
        (folder / name).write_bytes(b"x")
    (folder / "a/link").symlink_to(kept)
    (folder / "a/b/link").symlink_to(kept / "file")
    os.mkfifo(folder / "b/pipe")
    assert sorted(os.path.relpath(path, folder) for path in list_folders(folder)) == [
        ".",
        "a",
        "a/b",
        "a/b/a",
        "b",
        "b/a",
    ]
    remove_tree(folder)
    assert not folder.exists()
    assert (kept / "file").exists()


def test_what_is_no_folder_is_left(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "link").symlink_to(kept)
    for name in ("link", "none"):
        with pytest.raises(OSError, match=name):
            remove_tree(tmp_path / name)
        discard_tree(tmp_path / name)
    assert kept.exists()


def test_a_file_system_that_is_mounted_in_a_tree_keeps_its_files(tmp_path: Path) -> None:
    """A program may have mounted its data there, and a mount outlives the program."""
    folder, libc = tmp_path / "folder", ctypes.CDLL(None, use_errno=True)
    (folder / "a/mounted").mkdir(parents=True)
    (folder / "a/file").touch()
    mounted = folder / "a/mounted"
    if libc.mount(b"none", os.fsencode(mounted), b"tmpfs", 0, None):
        pytest.skip(f"only root can mount: {os.strerror(ctypes.get_errno())}")
    try:
        (mounted / "data").touch()
        for tree in (folder, folder / "a", mounted):
            with pytest.raises(OSError, match=r"mounted|busy"):
                remove_tree(tree)
        assert (mounted / "data").exists()
        assert not (folder / "a/file").exists()
    finally:
        libc.umount2(os.fsencode(mounted), MNT_DETACH)
    remove_tree(folder)
    assert not folder.exists()
