"""The installed program: where it is, and whether a service may run it."""

import stat
import sys
from pathlib import Path
from typing import Final

from leasehold_client.errors import LeaseholdError

_UNITS: Final = (
    Path(__file__).with_name("units"),
    Path(__file__).resolve().parents[3] / "deploy/systemd",
)
"""In a wheel, and in a checkout."""

_REMEDY: Final = (
    "install the wheel of Leasehold as root where other users can run it, such as in /opt/leasehold "
    "(docs/operations.md)"
)


def unit_template(unit: str) -> str:
    """The text of a unit of deploy/systemd."""
    return next(path for folder in _UNITS if (path := folder / unit).exists()).read_text(encoding="utf-8")


def service_program() -> Path:
    """The ``leasehold`` program of this installation.

    Raises:
        LeaseholdError: Users other than root could replace it, or the service's user could not run it.
    """
    program = Path(sys.executable).with_name("leasehold")
    if not program.exists():
        raise LeaseholdError(f"{program} does not exist: {_REMEDY}")
    for path in (program, Path(sys.executable)):
        for part in (path.absolute(), path.resolve(), *path.absolute().parents, *path.resolve().parents):
            _check(part)
    return program


def _check(part: Path) -> None:
    found = part.lstat()
    if stat.S_ISLNK(found.st_mode):
        return  # its directory and its target are checked too
    # The members of a group with gid 0 are trusted: a system's directories may belong to root:root with 0775.
    is_shared = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != 0)
    if found.st_uid != 0 or is_shared:
        raise LeaseholdError(
            f"users other than root may change {part}, which the service would run: {_REMEDY}"
        )
    if not found.st_mode & stat.S_IXOTH:
        raise LeaseholdError(f"the user of the service may not enter or run {part}: {_REMEDY}")
