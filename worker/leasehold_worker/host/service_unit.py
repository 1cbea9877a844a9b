"""The worker's unit, as systemd shows it."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

UNIT: Final = "leasehold-worker.service"
SYSTEMD: Final = Path("/run/systemd/system")

_PROPERTIES: Final = (
    *("LoadState", "UnitFileState", "ActiveState", "NeedDaemonReload", "FragmentPath", "DropInPaths"),
    *("ExecMainStartTimestampMonotonic", "MainPID", "User", "ControlGroup", "Delegate", "LimitCORESoft"),
)


@dataclass(frozen=True, slots=True)
class ServiceUnit:
    """A unit. The words are those of ``systemctl show``.

    Attributes:
        load_state: ``loaded``, or why not, such as ``not-found``.
        file_state: ``enabled``, ``disabled`` and so on.
        active_state: ``active``, ``failed`` and so on.
        is_outdated: Whether a file of the unit is newer than its start or than systemd's copy.
        main_pid: The daemon's process. 0: none.
        user: Its Unix user. Empty: root.
        control_group: Its control group, below the mount point. Empty: none.
        is_delegated: Whether the daemon may change the control group.
        core_limit: The soft limit of core dumps: bytes, or ``infinity``.
    """

    load_state: str
    file_state: str
    active_state: str
    is_outdated: bool
    main_pid: int
    user: str
    control_group: str
    is_delegated: bool
    core_limit: str


def read_unit(timeout_s: float) -> ServiceUnit | str:
    """Reads the unit of the worker. Blocks for the timeout at most.

    Returns:
        The unit, or the reason why it is unknown.
    """
    if not SYSTEMD.is_dir():
        return "this host does not run systemd"
    command = ["systemctl", "show", f"--property={','.join(_PROPERTIES)}", UNIT]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemctl does not answer: {error}"
    if done.returncode:
        return f"systemctl fails: {done.stderr.strip()}"
    return parse_unit(done.stdout)


def parse_unit(shown: str) -> ServiceUnit:
    """The unit that ``systemctl show`` prints. A missing property counts as empty."""
    found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    paths = [found.get("FragmentPath", ""), *found.get("DropInPaths", "").split()]
    started_us = int(found.get("ExecMainStartTimestampMonotonic") or 0)
    main_pid = int(found.get("MainPID") or 0)
    is_older = main_pid != 0 and _newest_s(paths) > time.time() - time.monotonic() + started_us / 1e6
    return ServiceUnit(
        load_state=found.get("LoadState", ""),
        file_state=found.get("UnitFileState", ""),
        active_state=found.get("ActiveState", ""),
        is_outdated=found.get("NeedDaemonReload") == "yes" or is_older,
        main_pid=main_pid,
        user=found.get("User", ""),
        control_group=found.get("ControlGroup", ""),
        is_delegated=found.get("Delegate") == "yes",
        core_limit=found.get("LimitCORESoft", ""),
    )


def _newest_s(paths: list[str]) -> float:
    """When the newest of the files was changed, in seconds of the Unix epoch. 0: none is readable."""
    newest = 0.0
    for path in paths:
        try:
            newest = max(newest, os.stat(path).st_mtime)
        except OSError:
            continue
    return newest
