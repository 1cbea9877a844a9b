"""Control groups of their own, which freeze processes or limit their memory."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

DEADLINE_S: Final = 10.0
Controller = Literal["freezer", "memory"]

_FILES: Final = {
    "freezer": ("cgroup.freeze", "freezer.state"),
    "memory": ("memory.max", "memory.limit_in_bytes"),
}
"""The file of each controller in version 2, and in version 1."""


class NoControlGroupError(Exception):
    """No control group with the controller can be made here."""


class ControlGroup:
    """A control group below the root of a hierarchy of version 2, or of version 1. No other group is changed.

    Raises:
        NoControlGroupError: This user or this host allows none.
    """

    def __init__(self, controller: Controller) -> None:
        for parent in _mounts():
            folder = parent / f"leasehold-test-{uuid.uuid4().hex[:12]}"
            try:
                folder.mkdir()
            except OSError:
                continue
            for version, name in zip((2, 1), _FILES[controller], strict=True):
                if (folder / name).exists():
                    self.folder, self._version = folder, version
                    return
            folder.rmdir()
        raise NoControlGroupError(f"no control group with the controller {controller} can be made here")

    def add(self, pid: int) -> None:
        """Moves a process into the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def freeze(self, pid: int) -> None:
        """Moves a process into the group, and waits until the kernel has frozen the group."""
        self.add(pid)
        self._write_state(frozen=True)

    def thaw(self) -> None:
        """Lets the processes of the group continue."""
        self._write_state(frozen=False)

    def limit_memory(self, size_bytes: int) -> None:
        """Limits the memory that processes of the group take from now on, and forbids swap."""
        if self._version == 1:
            names = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
        else:
            names = "memory.max", "memory.swap.max"
        (self.folder / names[0]).write_text(str(size_bytes))
        if (self.folder / names[1]).exists():
            (self.folder / names[1]).write_text(str(size_bytes if self._version == 1 else 0))

    def close(self) -> None:
        """Moves remaining processes to the root of the hierarchy, and removes the group."""
        end = time.monotonic() + DEADLINE_S
        while self.folder.exists() and time.monotonic() < end:
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (self.folder.parent / "cgroup.procs").write_text(pid)
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.01)

    def _write_state(self, *, frozen: bool) -> None:
        if self._version == 1:
            state = "FROZEN" if frozen else "THAWED"
            (self.folder / "freezer.state").write_text(state)
        else:
            state = f"frozen {int(frozen)}"
            (self.folder / "cgroup.freeze").write_text(str(int(frozen)))
        reading = self.folder / ("freezer.state" if self._version == 1 else "cgroup.events")
        end = time.monotonic() + DEADLINE_S
        while state not in reading.read_text():
            assert time.monotonic() < end, f"the control group does not become {state}"
            time.sleep(0.01)


def _mounts() -> list[Path]:
    """The roots of the hierarchies of control groups."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(row[1]) for row in rows if row[2] in ("cgroup2", "cgroup")]
