"""What the host has, by its own word and that of both versions of control groups."""

import os
from pathlib import Path

import pytest
from leasehold_worker.errors import StartError
from leasehold_worker.files.folder_trees import directory_bytes
from leasehold_worker.files.volume import disk_space
from leasehold_worker.host import cgroups
from leasehold_worker.host.capacity import HostLimits, hard_limits, limits_within

GIB = 2**30
HOST = HostLimits(16_000, 64 * GIB)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up host of 16 cores and 64 GiB, whose worker is in /outer/inner of version 2."""
    monkeypatch.setattr(cgroups, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr("leasehold_worker.host.processes.PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    (tmp_path / f"proc/{os.getpid()}").mkdir(parents=True)
    (tmp_path / "cgroup/outer/inner").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: 1 kB\n")
    be_in(tmp_path, "0::/outer/inner\n")
    return tmp_path / "cgroup"


def be_in(tmp_path: Path, lines: str) -> None:
    (tmp_path / f"proc/{os.getpid()}/cgroup").write_text(lines)


def test_without_groups_the_host_itself_is_the_limit(groups: Path) -> None:
    assert hard_limits() == HOST


def test_the_tightest_group_of_version_2_is_the_limit(groups: Path) -> None:
    (groups / "outer/cpu.max").write_text("350000 100000\n")
    (groups / "outer/inner/cpu.max").write_text("max 100000\n")
    (groups / "outer/memory.max").write_text(f"{8 * GIB}\n")
    (groups / "outer/inner/memory.max").write_text(f"{6 * GIB}\n")
    assert hard_limits() == HostLimits(3500, 6 * GIB)


def test_the_tightest_group_of_version_1_is_the_limit(groups: Path, tmp_path: Path) -> None:
    be_in(tmp_path, "5:memory:/job\n4:cpuacct,cpu:/job\n1:name=systemd:/\n0::/\n")
    for controller in ("memory", "cpu"):
        (groups / controller / "job").mkdir(parents=True)
    (groups / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (groups / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (groups / "cpu/job/cpu.cfs_quota_us").write_text("25000\n")
    (groups / "cpu/job/cpu.cfs_period_us").write_text("50000\n")
    (groups / "memory/memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (groups / "memory/job/memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    assert hard_limits() == HostLimits(500, 3 * GIB)


def test_a_group_that_allows_more_than_there_is_limits_nothing(groups: Path) -> None:
    (groups / "outer/cpu.max").write_text("9900000 100000\n")
    (groups / "outer/memory.max").write_text(f"{900 * GIB}\n")
    assert hard_limits() == HOST


def test_files_that_make_no_sense_limit_nothing(groups: Path) -> None:
    (groups / "outer/cpu.max").write_text("100000\n")
    (groups / "outer/inner/cpu.max").write_text("100000 0\n")
    (groups / "outer/memory.max").write_text("\n")
    assert hard_limits() == HOST


def test_a_cpu_set_counts(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    assert hard_limits().cpu_millicores == 2000


def test_this_host_has_something() -> None:
    limits = hard_limits()
    assert limits.cpu_millicores > 0
    assert limits.memory_bytes > 2**20


def test_the_configuration_sets_less_or_nothing() -> None:
    assert limits_within(HOST) == HOST
    assert limits_within(HOST, 500, GIB) == HostLimits(500, GIB)
    assert limits_within(HOST, 16_000, 64 * GIB) == HOST


def test_a_limit_above_what_there_is_is_refused() -> None:
    with pytest.raises(StartError, match="cpu_limit_millicores 16001 is more than the 16000"):
        limits_within(HOST, cpu_limit_millicores=16_001)
    with pytest.raises(
        StartError, match=r"memory_limit 65 GiB is more than the 64 GiB .* give 68719476736 at most"
    ):
        limits_within(HOST, memory_limit_bytes=65 * GIB)


def test_a_volume_is_read(tmp_path: Path) -> None:
    space = disk_space(tmp_path)
    assert 0 < space.available_bytes <= space.total_bytes
    with pytest.raises(FileNotFoundError):
        disk_space(tmp_path / "none")


def test_a_directory_takes_what_its_files_take(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    empty = directory_bytes(tmp_path)
    (tmp_path / "a/b/file").write_bytes(b"x" * 100_000)
    (tmp_path / "a/loop").symlink_to(tmp_path)
    assert 100_000 <= directory_bytes(tmp_path) - empty < 200_000
    assert directory_bytes(tmp_path / "none") == 0
