"""Host memory: what control groups leave, and what suspends were promised."""

import os
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.host import cgroups
from leasehold_worker.host.cgroups import (
    MemoryLimit,
    is_frozen,
    is_limited_below,
    memory_groups,
    memory_limits,
)
from leasehold_worker.leasing import suspend_memory
from leasehold_worker.leasing.suspend_memory import SuspendMemory

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up hierarchy; processes 10 and 11 are in /outer/inner, 12 is in /outer."""
    monkeypatch.setattr(cgroups, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path / "cgroup")
    for pid, group in ((10, "/outer/inner"), (11, "/outer/inner"), (12, "/outer")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::{group}\n")
    (tmp_path / "cgroup/outer/inner").mkdir(parents=True)
    return tmp_path / "cgroup"


def limit(group: Path, limit_bytes: object, used_bytes: int, cache_bytes: int = 0) -> None:
    (group / "memory.max").write_text(f"{limit_bytes}\n")
    (group / "memory.current").write_text(f"{used_bytes}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache_bytes}\n")


def have_available(monkeypatch: pytest.MonkeyPatch, available_bytes: int | None) -> None:
    monkeypatch.setattr(suspend_memory, "memory_bytes", lambda field: available_bytes)


def test_every_group_around_a_process_counts(groups: Path) -> None:
    limit(groups / "outer", 10 * GIB, 4 * GIB)
    limit(groups / "outer/inner", "max", GIB)
    assert memory_limits(memory_groups(10)) == [MemoryLimit(groups / "outer", 6 * GIB)]
    limit(groups / "outer/inner", 2 * GIB, GIB)
    assert [found.available_bytes for found in memory_limits(memory_groups(10))] == [GIB, 6 * GIB]


def test_page_cache_counts_as_free(groups: Path) -> None:
    limit(groups / "outer", 4 * GIB, 3 * GIB, cache_bytes=2 * GIB)
    assert memory_limits(memory_groups(12))[0].available_bytes == 3 * GIB


def test_a_process_may_have_lower_limits_than_another(groups: Path) -> None:
    assert not is_limited_below(10, 12)
    (groups / "outer/cpu.max").write_text("200000 100000\n")
    limit(groups / "outer", 10 * GIB, GIB)
    assert not is_limited_below(10, 12), "both are below it"
    assert is_limited_below(10, 999), "the other one has no limit"
    (groups / "outer/inner/cpu.max").write_text("100000 100000\n")
    assert is_limited_below(10, 12)
    assert not is_limited_below(12, 10)
    (groups / "outer/inner/cpu.max").write_text("max 100000\n")
    limit(groups / "outer/inner", 9 * GIB, GIB)
    assert is_limited_below(10, 12)


def test_version_1_is_read_too(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "proc/10/cgroup").write_text("4:memory:/job\n6:freezer:/job\n0::/\n")
    for controller in ("memory", "freezer"):
        (groups / controller / "job").mkdir(parents=True)
    (groups / "memory/job/memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (groups / "memory/job/memory.usage_in_bytes").write_text(f"{GIB}\n")
    (groups / "memory/memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (groups / "memory/memory.usage_in_bytes").write_text(f"{GIB}\n")
    assert memory_limits(memory_groups(10)) == [MemoryLimit(groups / "memory/job", 3 * GIB)]
    assert not is_frozen(10)
    (groups / "freezer/job/freezer.state").write_text("FROZEN\n")
    assert is_frozen(10)


def test_a_frozen_group_freezes_all_that_is_in_it(groups: Path) -> None:
    (groups / "outer/cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert not is_frozen(10)
    (groups / "outer/cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert is_frozen(10)
    assert is_frozen(12)


def test_what_can_not_be_read_limits_nothing(groups: Path) -> None:
    assert memory_limits(memory_groups(10)) == []
    assert memory_limits(memory_groups(99)) == []
    assert not is_frozen(99)


def test_this_process_can_be_asked() -> None:
    assert all(found.available_bytes >= 0 for found in memory_limits(memory_groups(os.getpid())))


def test_two_suspends_can_not_both_have_the_same_memory(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_available(monkeypatch, 10 * GIB)
    ledger = SuspendMemory(reserve_bytes=2 * GIB)
    with ledger.charged({10: 5 * GIB}):
        assert ledger.promised_bytes == 5 * GIB
        assert ledger.need({12: 0}).available_bytes == 3 * GIB
        with pytest.raises(OperationError) as refused, ledger.charged({12: 4 * GIB}):
            pass
        assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY
        assert "4 GiB of device memory exceed the 3 GiB" in refused.value.message
    assert ledger.promised_bytes == 0
    with ledger.charged({12: 8 * GIB}):
        pass


def test_a_failed_operation_gives_its_memory_back(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_available(monkeypatch, 10 * GIB)
    ledger = SuspendMemory(0)
    with pytest.raises(RuntimeError), ledger.charged({10: GIB}):
        raise RuntimeError
    assert ledger.promised_bytes == 0


def test_the_tightest_group_decides(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_available(monkeypatch, 100 * GIB)
    limit(groups / "outer", 10 * GIB, 4 * GIB)
    limit(groups / "outer/inner", 5 * GIB, GIB)
    ledger = SuspendMemory(0)
    need = ledger.need({10: 2 * GIB, 11: 2 * GIB, 12: GIB})
    assert need.cgroup == MemoryLimit(groups / "outer/inner", 4 * GIB)
    need.check()
    with ledger.charged({10: GIB}):
        with pytest.raises(OperationError, match="outer/inner: raise its memory limit"):
            ledger.need({10: 2 * GIB, 11: 2 * GIB}).check()
        with pytest.raises(OperationError, match=r"outer: raise"):
            ledger.need({12: 6 * GIB}).check()


def test_an_unknown_host_is_not_refused(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_available(monkeypatch, None)
    SuspendMemory().need({10: 2**50}).check()
