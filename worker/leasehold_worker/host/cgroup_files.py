"""The interface files of control groups of version 2, written as the kernel wants it."""

import os
from pathlib import Path
from typing import Final, Protocol, final

_SYSTEMD: Final = Path("/run/systemd/system")


class ControlFiles(Protocol):
    """What the kernel offers below /sys/fs/cgroup. All raise OSError as it does."""

    def read(self, path: Path) -> str:
        """The text of an interface file."""

    def write(self, path: Path, text: str) -> None:
        """Writes to an interface file, which is there already."""

    def make_group(self, path: Path) -> None:
        """Makes a group, with its interface files. One that is there already is left as it is."""

    def remove_group(self, path: Path) -> None:
        """Removes a group without processes and without groups below."""

    def is_ours(self, path: Path) -> bool:
        """Whether the group was handed over to us."""


@final
class KernelFiles:
    """The kernel's own."""

    def read(self, path: Path) -> str:
        """The text of an interface file."""
        return path.read_text(encoding="ascii")

    def write(self, path: Path, text: str) -> None:
        """Writes in one call, as the kernel wants it, and creates nothing."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode("ascii"))
        finally:
            os.close(descriptor)

    def make_group(self, path: Path) -> None:
        """Makes a group."""
        path.mkdir(exist_ok=True)

    def remove_group(self, path: Path) -> None:
        """Removes a group."""
        path.rmdir()

    def is_ours(self, path: Path) -> bool:
        """Whether we may write, and systemd, where it runs and we are root, has left the group to us."""
        files = (path, path / "cgroup.procs", path / "cgroup.subtree_control")
        if not all(os.access(file, os.W_OK) for file in files):
            return False
        if os.geteuid() != 0 or not _SYSTEMD.is_dir():
            return True
        return any(_is_delegated(group) for group in (path, *path.parents))


def _is_delegated(group: Path) -> bool:
    """Systemd marks what it leaves to others, in one of these attributes by its version."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False
