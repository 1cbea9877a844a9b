"""What control groups allow a process: how much more memory, and whether it may run at all.

Both versions of the interface are read (cgroups(7)). What can't be read limits nothing that we know of.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")

UNLIMITED_BYTES: Final = 2**60
"""Version 1 writes a limit near 2**63 where there is none."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A control group with a memory limit.

    Attributes:
        path: Its directory, which names it.
        available_bytes: What its processes may still take; page cache counts as free.
    """

    path: Path
    available_bytes: int


def memory_limits(pid: int) -> list[MemoryLimit]:
    """The groups with a memory limit that the process is in, innermost first."""
    return [limit for group in _groups(pid, "memory") if (limit := _memory_limit(group)) is not None]


def is_frozen(pid: int) -> bool:
    """Whether the freezer stops the process, so that it can't answer the driver."""
    return any(_group_is_frozen(group) for group in _groups(pid, "freezer"))


def _groups(pid: int, controller: str) -> Iterator[Path]:
    """The directories of the process's group and of those around it, for one controller."""
    try:
        lines = (_PROC / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = _CGROUP / controllers if controllers else _version_2_root()
        # In a namespace of its own, a process elsewhere is shown with a path above the root.
        group = top / name.lstrip("/") if ".." not in Path(name).parts else top
        while group.is_relative_to(top):
            yield group
            group = group.parent


def _version_2_root() -> Path:
    """Beside version 1, version 2 is mounted below it."""
    beside = _CGROUP / "unified"
    return beside if beside.is_dir() else _CGROUP


def _memory_limit(group: Path) -> MemoryLimit | None:
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
            reclaimable = _inactive_file_bytes(group)
            return MemoryLimit(group, max(0, limit - max(0, usage - reclaimable)))
    return None


def _inactive_file_bytes(group: Path) -> int:
    """Page cache that the kernel gives up before it kills anybody."""
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
    """The number in a file. None: there is no file, or no number ("max")."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
