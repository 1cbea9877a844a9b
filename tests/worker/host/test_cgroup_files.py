"""The kernel's interface files."""

import errno
import os
from pathlib import Path

import pytest
from leasehold_worker.host import cgroup_files
from leasehold_worker.host.cgroup_files import KernelFiles


def test_the_kernels_files_are_written_and_never_created(tmp_path: Path) -> None:
    real = KernelFiles()
    (tmp_path / "cpu.max").write_text("max")
    real.write(tmp_path / "cpu.max", "1000 100000")
    assert real.read(tmp_path / "cpu.max") == "1000 100000"
    with pytest.raises(FileNotFoundError):
        real.write(tmp_path / "memory.max", "1")
    real.make_group(tmp_path / "group")
    real.make_group(tmp_path / "group")
    real.remove_group(tmp_path / "group")
    assert not real.is_ours(tmp_path / "group")


def test_to_root_under_systemd_a_group_is_ours_only_where_systemd_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup_files, "_SYSTEMD", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    group = tmp_path / "leasehold.service/inner"
    group.mkdir(parents=True)
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (group / name).write_text("")
    marks: dict[tuple[Path, str], bytes] = {}

    def attribute(path: Path, name: str) -> bytes:
        if (path, name) not in marks:
            raise OSError(errno.ENODATA, "No data available")
        return marks[path, name]

    monkeypatch.setattr(os, "getxattr", attribute)
    assert not KernelFiles().is_ours(group)
    for name in ("user.delegate", "trusted.delegate"):
        marks[group.parent, name] = b"1"
        assert KernelFiles().is_ours(group)
        marks[group.parent, name] = b"0"
        assert not KernelFiles().is_ours(group)
    monkeypatch.setattr(cgroup_files, "_SYSTEMD", tmp_path / "none")
    assert KernelFiles().is_ours(group)
