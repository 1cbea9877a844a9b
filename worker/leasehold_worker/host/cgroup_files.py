"""The interface files of control groups of version 2, with the kernel's rules for writes."""

import os
from pathlib import Path
from typing import Final, Protocol, final

_SYSTEMD: Final = Path("/run/systemd/system")


class ControlFiles(Protocol):
    """The control groups below /sys/fs/cgroup. All methods raise the kernel's OSError."""

    def read(self, path: Path) -> str:
        """The text of an interface file."""

    def write(self, path: Path, text: str) -> None:
        """Writes to an existing interface file."""

    def make_group(self, path: Path) -> None:
        """Creates a group. An existing one is left as it is."""

    def remove_group(self, path: Path) -> None:
        """Removes a group without processes and without child groups."""

    def is_ours(self, path: Path) -> bool:
        """Whether the group is delegated to the worker."""


@final
class KernelFiles:
    """The kernel's own files."""

    def read(self, path: Path) -> str:
        """The text of an interface file."""
        return path.read_text(encoding="ascii")

    def write(self, path: Path, text: str) -> None:
        """Writes in one call, as the kernel requires, and creates no file."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode("ascii"))
        finally:
            os.close(descriptor)

    def make_group(self, path: Path) -> None:
        """Creates a group."""
        path.mkdir(exist_ok=True)

    def remove_group(self, path: Path) -> None:
        """Removes a group."""
        path.rmdir()

    def is_ours(self, path: Path) -> bool:
        """Whether the worker may write and, as root under systemd, the group is delegated to it."""
        files = (path, path / "cgroup.procs", path / "cgroup.subtree_control")
        if not all(os.access(file, os.W_OK) for file in files):
            return False
        if os.geteuid() != 0 or not _SYSTEMD.is_dir():
            return True
        return any(_is_delegated(group) for group in (path, *path.parents))


def _is_delegated(group: Path) -> bool:
    """Whether systemd has marked the group as delegated, in one of these attributes by its version."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False
