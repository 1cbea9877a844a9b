"""Limits of control groups on a process: memory, CPU time, and the freezer.

Both versions of the interface are read (cgroups(7)). A file that can't be read counts as no limit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")

UNLIMITED_BYTES: Final = 2**60
"""Version 1 writes a limit near 2**63 for "none"."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A control group with a memory limit.

    Attributes:
        path: Its directory.
        available_bytes: Memory left for its processes; page cache counts as free.
    """

    path: Path
    available_bytes: int


def memory_groups(pid: int) -> list[Path]:
    """The groups that count the memory of the process, innermost first."""
    return list(_groups(pid, "memory"))


def memory_limits(groups: Iterable[Path]) -> list[MemoryLimit]:
    """The groups with a memory limit, in order."""
    return [limit for group in groups if (limit := _memory_limit(group)) is not None]


def memory_limit_bytes(pid: int) -> int | None:
    """The lowest memory limit of the process's groups, used or not. None: there is none."""
    limits = [limit for group in _groups(pid, "memory") if (limit := _memory_limit_bytes(group)) is not None]
    return min(limits, default=None)


def cpu_limit_millicores(pid: int) -> int | None:
    """The lowest CPU limit of the process's groups, in thousandths of a core. None: there is none."""
    limits = [limit for group in _groups(pid, "cpu") if (limit := _cpu_limit_millicores(group)) is not None]
    return min(limits, default=None)


def is_limited_below(pid: int, other: int) -> bool:
    """Whether a process has a memory or CPU limit by control groups that is lower than another process's."""
    return any(
        limit is not None and (bound is None or limit < bound)
        for limit, bound in (
            (memory_limit_bytes(pid), memory_limit_bytes(other)),
            (cpu_limit_millicores(pid), cpu_limit_millicores(other)),
        )
    )


def version_2_group(pid: int) -> Path | None:
    """The directory of the process's group of version 2. None: no group is visible."""
    for line in _lines(pid):
        if line.startswith("0::"):
            name = line.removeprefix("0::")
            group = version_2_root() / name.lstrip("/")
            return group if ".." not in Path(name).parts and group.is_dir() else None
    return None


def is_frozen(pid: int) -> bool:
    """Whether the freezer stops the process, so that it can't answer the driver."""
    return any(_group_is_frozen(group) for group in _groups(pid, "freezer"))


def _groups(pid: int, controller: str) -> Iterator[Path]:
    """The directories of the process's group and its ancestors, for one controller."""
    for line in _lines(pid):
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = _version_1_root(controllers, controller) if controllers else version_2_root()
        # In a namespace of its own, a process elsewhere is shown with a path above the root.
        group = top / name.lstrip("/") if ".." not in Path(name).parts else top
        while group.is_relative_to(top):
            yield group
            group = group.parent


def _lines(pid: int) -> list[str]:
    try:
        text = (_PROC / str(pid) / "cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return text.split("\n")  # not splitlines(): the names of groups may contain other line separators


def _version_1_root(controllers: str, controller: str) -> Path:
    """Some hosts mount "cpuacct,cpu" under the other order of names, with a link for each name."""
    together = _CGROUP / controllers
    return together if together.is_dir() else _CGROUP / controller


def version_2_root() -> Path:
    """The mount point of version 2. On hosts with both versions it is below that of version 1."""
    unified = _CGROUP / "unified"
    return unified if unified.is_dir() else _CGROUP


def _memory_limit(group: Path) -> MemoryLimit | None:
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _number(group / limit_file)
        if limit is None or limit >= UNLIMITED_BYTES:
            continue  # no limit, so the usage is irrelevant
        usage = _number(group / usage_file)
        if usage is not None:
            reclaimable = _inactive_file_bytes(group)
            return MemoryLimit(group, max(0, limit - max(0, usage - reclaimable)))
    return None


def _memory_limit_bytes(group: Path) -> int | None:
    limits = (_number(group / "memory.max"), _number(group / "memory.limit_in_bytes"))
    return min((limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES), default=None)


def _cpu_limit_millicores(group: Path) -> int | None:
    """The quota, as a share of the period. Version 1 writes a quota of -1 for "none"."""
    try:
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        quota, period = str(_number(group / "cpu.cfs_quota_us")), str(_number(group / "cpu.cfs_period_us"))
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) * 1000 // int(period)


def _inactive_file_bytes(group: Path) -> int:
    """Page cache that the kernel reclaims before it kills a process."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _group_is_frozen(group: Path) -> bool:
    try:
        if (group / "freezer.state").exists():
            return (group / "freezer.state").read_text(encoding="ascii").strip() != "THAWED"
        return "frozen 1" in (group / "cgroup.events").read_text(encoding="ascii").splitlines()
    except OSError:
        return False


def _number(path: Path) -> int | None:
    """The number in a file. None: the file is missing, or holds no number ("max")."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
