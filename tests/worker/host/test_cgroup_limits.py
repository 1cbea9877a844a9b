"""Limits by control groups, against a folder that answers as the kernel does."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.host import cgroup_limits, cgroups
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity

GIB = 2**30
ME = os.getpid()
CHILD, STRANGER = 900_001, 900_002


def refuse(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class FakeKernel:
    """Version 2, as cgroups(7) has it, on plain files: controllers, moves, and no internal processes."""

    def __init__(self, root: Path, controllers: str = "cpu memory pids") -> None:
        self.root = root
        self.delegated = True
        self.ended: set[int] = set()
        self.refuses: dict[str, int] = {}
        """Errors by the name of the file that is written."""
        root.mkdir(parents=True)
        (root / "cgroup.controllers").write_text(controllers + "\n")
        (root / "cgroup.subtree_control").write_text(controllers + "\n")
        (root / "cgroup.procs").write_text("1\n")

    def read(self, path: Path) -> str:
        return path.read_text()

    def write(self, path: Path, text: str) -> None:
        if path.name in self.refuses:
            raise refuse(self.refuses[path.name])
        if not path.exists():
            raise refuse(errno.ENOENT)
        if path.name == "cgroup.procs":
            self.move(int(text), path.parent)
        elif path.name == "cgroup.subtree_control":
            self.turn_on(text.removeprefix("+"), path.parent)
        else:
            path.write_text(text + "\n")

    def make_group(self, path: Path) -> None:
        if path.is_dir():
            return
        path.mkdir()
        controllers = (path.parent / "cgroup.subtree_control").read_text()
        (path / "cgroup.controllers").write_text(controllers)
        (path / "cgroup.type").write_text("domain\n")
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            (path / name).write_text("")
        self.add_files(path, controllers.split())

    def remove_group(self, path: Path) -> None:
        if not path.is_dir():
            raise refuse(errno.ENOENT)
        if self.processes(path) or any(below.is_dir() for below in path.iterdir()):
            raise refuse(errno.EBUSY)
        shutil.rmtree(path)

    def is_ours(self, path: Path) -> bool:
        return self.delegated

    def processes(self, path: Path) -> list[int]:
        return [int(pid) for pid in (path / "cgroup.procs").read_text().split()]

    def move(self, pid: int, group: Path) -> None:
        if pid in self.ended:
            raise refuse(errno.ESRCH)
        if (group / "cgroup.subtree_control").read_text().strip():
            raise refuse(errno.EBUSY)
        for file in self.root.rglob("cgroup.procs"):
            file.write_text("".join(f"{other}\n" for other in self.processes(file.parent) if other != pid))
        (group / "cgroup.procs").write_text("".join(f"{p}\n" for p in [*self.processes(group), pid]))

    def turn_on(self, controller: str, group: Path) -> None:
        if controller not in (group / "cgroup.controllers").read_text().split():
            raise refuse(errno.ENOENT)
        if self.processes(group):
            raise refuse(errno.EBUSY)
        on = (group / "cgroup.subtree_control").read_text().split()
        if controller in on:
            return
        (group / "cgroup.subtree_control").write_text(" ".join(sorted({*on, controller})) + "\n")
        for below in group.iterdir():
            if below.is_dir():
                self.add_files(below, [controller])

    def add_files(self, group: Path, controllers: list[str]) -> None:
        if "cpu" in controllers:
            (group / "cpu.max").write_text("max 100000\n")
        if "memory" in controllers:
            (group / "memory.max").write_text("max\n")
            (group / "memory.current").write_text("0\n")
        if "pids" in controllers:
            (group / "pids.max").write_text("max\n")


class Host:
    """A worker with a child, in a service of its own."""

    def __init__(self, folder: Path, controllers: str = "cpu memory pids") -> None:
        self.folder = folder
        self.kernel = FakeKernel(folder / "cgroup", controllers)
        self.base = folder / "cgroup/leasehold.service"
        self.kernel.make_group(self.base)
        self.enter("/leasehold.service", ME, CHILD)

    def enter(self, group: str, *pids: int) -> None:
        for pid in pids:
            self.kernel.move(pid, self.folder / "cgroup" / group.lstrip("/"))
        (self.folder / f"proc/{ME}").mkdir(parents=True, exist_ok=True)
        (self.folder / f"proc/{ME}/cgroup").write_text(f"0::{group}\n")

    def probe(self) -> ResourceLimits:
        return ResourceLimits.probe(self.kernel)

    def text(self, path: str) -> str:
        return (self.base / path).read_text().strip()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(cgroups, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path / "cgroup")
    tree = [ProcessIdentity(Pid(ME), 1), ProcessIdentity(Pid(CHILD), 2)]
    monkeypatch.setattr(cgroup_limits, "process_tree", lambda root: tree)
    return Host(tmp_path)


def enforced(limits: ResourceLimits) -> tuple[bool, bool]:
    return not limits.cpu_refusal, not limits.memory_refusal


def test_the_worker_makes_way_for_its_workloads(host: Host) -> None:
    limits = host.probe()
    assert enforced(limits) == (True, True)
    assert host.kernel.processes(host.base) == []
    assert sorted(host.kernel.processes(host.base / "agent")) == sorted([ME, CHILD])
    assert host.text("cgroup.subtree_control") == "cpu memory pids"


def test_a_workload_has_its_limits(host: Host) -> None:
    limits = host.probe()
    group = limits.create("w-1", 1500, 2 * GIB)
    assert group == host.base / "workload-w-1"
    assert host.text("workload-w-1/cpu.max") == "150000 100000"
    assert host.text("workload-w-1/memory.max") == str(2 * GIB)
    limits.add(group, 900_003)
    assert host.kernel.processes(group) == [900_003]
    assert limits.find("w-1") == group
    assert limits.find("w-2") is None


@pytest.mark.parametrize(
    ("cpu_millicores", "memory_bytes", "cpu_max", "memory_max"),
    [(1000, 0, "100000 100000", "max"), (0, GIB, "max 100000", str(GIB)), (1, 1, "1000 100000", "1")],
)
def test_what_was_not_promised_is_not_limited(
    host: Host, cpu_millicores: int, memory_bytes: int, cpu_max: str, memory_max: str
) -> None:
    host.probe().create("w", cpu_millicores, memory_bytes)
    assert host.text("workload-w/cpu.max") == cpu_max
    assert host.text("workload-w/memory.max") == memory_max


def test_without_promises_a_group_limits_nothing(host: Host) -> None:
    assert host.probe().create("w", 0, 0) == host.base / "workload-w"
    assert host.text("workload-w/cpu.max") == "max 100000"
    assert host.text("workload-w/memory.max") == "max"


def test_a_workload_has_a_bounded_number_of_processes(host: Host) -> None:
    host.probe().create("w", 0, 0)
    assert host.text("workload-w/pids.max") == "32768"


def test_without_the_controller_of_processes_the_other_limits_stay(host: Host) -> None:
    (host.base / "cgroup.controllers").write_text("cpu memory\n")
    limits = host.probe()
    assert enforced(limits) == (True, True)
    limits.create("w", 1000, GIB)
    assert host.text("workload-w/memory.max") == str(GIB)
    assert not (host.base / "workload-w/pids.max").exists()


def test_a_group_is_killed_as_one(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    limits = host.probe()
    limits.kill("w")
    group = limits.create("w", 0, 0)
    assert group is not None
    limits.kill("w")  # a kernel before 5.14 has no such file
    (group / "cgroup.kill").touch()
    limits.kill("w")
    assert host.text("workload-w/cgroup.kill") == "1"
    assert not caplog.records


def test_a_group_goes_with_its_processes(host: Host) -> None:
    limits = host.probe()
    group = limits.create("w", 1000, GIB)
    assert group is not None
    limits.add(group, 900_003)
    assert not limits.remove(group)
    host.kernel.make_group(group / "made-by-the-workload")
    host.kernel.move(900_003, host.base / "agent")
    assert limits.remove(group)
    assert not group.exists()
    assert limits.remove(group), "once more does no harm"


def test_a_start_takes_up_what_runs_and_removes_what_ended(host: Host) -> None:
    limits = host.probe()
    alive, ended = limits.create("alive", 1000, GIB), limits.create("ended", 1000, GIB)
    assert alive is not None
    assert ended is not None
    limits.add(alive, 900_003)
    host.enter("/leasehold.service/agent", ME)
    again = host.probe()
    assert enforced(again) == (True, True)
    assert (again.find("alive"), again.find("ended")) == (alive, None)
    assert again.create("alive", 500, 1) == alive
    assert host.text("workload-alive/memory.max") == str(GIB), "a lower one could kill it"


def test_a_process_that_has_ended_needs_no_limits(host: Host) -> None:
    limits = host.probe()
    group = limits.create("w", 1000, GIB)
    assert group is not None
    host.kernel.ended.add(900_003)
    limits.add(group, 900_003)
    host.kernel.refuses["cgroup.procs"] = errno.EACCES
    with pytest.raises(OperationError, match="Permission denied") as refused:
        limits.add(group, 900_004)
    assert refused.value.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS


def test_limits_that_the_kernel_refuses_leave_no_group(host: Host) -> None:
    limits = host.probe()
    host.kernel.refuses["memory.max"] = errno.EINVAL
    with pytest.raises(OperationError, match="Invalid argument") as refused:
        limits.create("w", 1000, GIB)
    assert refused.value.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
    assert not (host.base / "workload-w").exists()


def test_a_memory_limit_makes_room_for_what_is_parked_and_is_lowered_once_it_is_gone(host: Host) -> None:
    limits = host.probe()
    group = limits.create("w", 0, GIB)
    assert group is not None
    assert limits.set_memory(group, 9 * GIB)
    (group / "memory.current").write_text(f"{8 * GIB}\n")
    assert not limits.set_memory(group, GIB)
    assert host.text("workload-w/memory.max") == str(9 * GIB)
    (group / "memory.current").write_text("1\n")
    assert limits.set_memory(group, GIB)
    with pytest.raises(OperationError, match="No such file"):
        limits.set_memory(host.base / "none", GIB)


@pytest.mark.parametrize("workload_id", ["", "../agent", "a/b", "..", ".hidden", "a\nb", "x" * 300])
def test_no_id_leads_out_of_the_base(host: Host, workload_id: str) -> None:
    limits = host.probe()
    with pytest.raises(OperationError, match="can't name a control group") as refused:
        limits.create(workload_id, 1, 1)
    assert refused.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    with pytest.raises(OperationError, match="can't name a control group"):
        limits.find(workload_id)


# Where it can't be.


def check_refused(host: Host, text: str) -> None:
    """Both are refused, and nothing was moved."""
    limits = host.probe()
    assert text in limits.cpu_refusal
    assert text in limits.memory_refusal
    assert limits.create("w", 1000, GIB) is None
    assert limits.find("w") is None
    assert not limits.set_memory(host.base / "workload-w", GIB)
    assert not (host.base / "agent").exists()


def test_a_group_that_was_not_handed_over_is_left_alone(host: Host) -> None:
    host.kernel.delegated = False
    check_refused(host, "is not delegated to the worker: start the worker as a systemd service")


def test_strangers_are_not_moved(host: Host) -> None:
    host.kernel.move(STRANGER, host.base)
    check_refused(host, f"shares control group {host.base} with process {STRANGER}")
    assert host.kernel.processes(host.base) == [ME, CHILD, STRANGER]


def test_the_root_is_left_alone(host: Host) -> None:
    (host.folder / f"proc/{ME}/cgroup").write_text("0::/\n")
    check_refused(host, "in the root control group")


def test_without_version_2_there_are_no_limits(host: Host) -> None:
    (host.folder / f"proc/{ME}/cgroup").write_text("4:memory:/job\n3:cpu:/job\n")
    check_refused(host, "control groups of version 2 are not there")


def test_a_group_that_can_not_be_read_is_said(host: Host) -> None:
    (host.base / "cgroup.controllers").unlink()
    check_refused(host, "can't be prepared: No such file or directory")


def test_one_controller_alone_is_made_use_of(tmp_path: Path, host: Host) -> None:
    (host.base / "cgroup.controllers").write_text("memory pids\n")
    limits = host.probe()
    assert enforced(limits) == (False, True)
    assert "the cpu controller of version 2 is not available" in limits.cpu_refusal
    assert limits.create("cpu-only", 1000, 0) is not None
    limits.create("w", 1000, GIB)
    assert host.text("workload-w/memory.max") == str(GIB)
    assert not (host.base / "workload-w/cpu.max").exists()


def test_a_controller_that_does_not_turn_on_is_said(host: Host) -> None:
    host.kernel.refuses["cgroup.subtree_control"] = errno.EINVAL
    limits = host.probe()
    assert "the memory controller can't be turned on" in limits.memory_refusal
    assert "Invalid argument" in limits.cpu_refusal
    assert limits.create("w", 1000, GIB) is None


def test_a_group_that_does_not_go_is_logged(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    limits = host.probe()
    group = limits.create("w", 1000, GIB)
    assert group is not None

    def fail(path: Path) -> None:
        raise refuse(errno.EACCES)

    host.kernel.remove_group = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert not limits.remove(group)
    assert "can't be removed: Permission denied" in caplog.text


# The real kernel.


def test_a_worker_that_shares_its_group_with_these_tests_is_refused() -> None:
    program = (
        "from leasehold_worker.host.cgroup_limits import ResourceLimits as R;"
        "limits = R.probe(); print(limits.cpu_refusal); print(limits.memory_refusal);"
        "assert limits.create('w', 1000, 2**30) is None"
    )
    before = Path("/proc/self/cgroup").read_text()
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    refusals = printed.stdout.splitlines()
    assert len(refusals) == 2
    assert all("start the worker as a systemd service with Delegate=yes" in refusal for refusal in refusals)
    assert Path("/proc/self/cgroup").read_text() == before
