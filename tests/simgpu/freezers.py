"""Control groups that freeze processes."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

DEADLINE_S = 10.0


class NoFreezerError(Exception):
    """No control group can be made here."""


class Freezer:
    """A control group of its own, of version 2 or of version 1.

    Raises:
        NoFreezerError: This user or this host allows none.
    """

    def __init__(self) -> None:
        for parent, name in _parents():
            self.folder = parent / f"leasehold-test-{uuid.uuid4().hex[:12]}"
            try:
                self.folder.mkdir()
            except OSError:
                continue
            self._version_1 = name == "freezer"
            if (self.folder / ("freezer.state" if self._version_1 else "cgroup.freeze")).exists():
                self._parent = parent
                return
            self.folder.rmdir()
        raise NoFreezerError("a control group can't be made here")

    def freeze(self, pid: int) -> None:
        """Moves a process into the group, and waits until the kernel has frozen the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))
        self._write(frozen=True)

    def thaw(self) -> None:
        """Lets the processes of the group continue."""
        self._write(frozen=False)

    def close(self) -> None:
        """Lets the processes continue and removes the group. Its processes are moved out first."""
        self.thaw()
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (self._parent / "cgroup.procs").write_text(pid)
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.01)

    def _write(self, *, frozen: bool) -> None:
        if self._version_1:
            state = "FROZEN" if frozen else "THAWED"
            (self.folder / "freezer.state").write_text(state)
        else:
            state = f"frozen {int(frozen)}"
            (self.folder / "cgroup.freeze").write_text(str(int(frozen)))
        reading = self.folder / ("freezer.state" if self._version_1 else "cgroup.events")
        end = time.monotonic() + DEADLINE_S
        while state not in reading.read_text():
            assert time.monotonic() < end, f"the control group does not become {state}"
            time.sleep(0.01)


def _parents() -> list[tuple[Path, str]]:
    """The mounts of control groups that can freeze."""
    found = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.append((Path(where), "unified"))
        elif kind == "cgroup" and "freezer" in options.split(","):
            found.append((Path(where), "freezer"))
    return [(path, name) for path, name in found if os.access(path, os.W_OK)]
