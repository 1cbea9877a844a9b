"""CPU and memory limits that the kernel enforces on workloads, by control groups of version 2.

Each workload that the worker starts or that reserves CPU time or memory gets a group below the worker's own::

    leasehold.service        the base: delegated to the worker (Delegate=yes), with no process in it
      agent                  the worker
      workload-<id>          cpu.max, memory.max, pids.max

The kernel allows limits only below groups without processes of their own ("no internal processes",
cgroups(7)), so the worker moves itself out of the way first. A systemd service needs DelegateSubgroup=agent
besides: a second start could not enter the base while limits are on. If a part of this is not available, only
the ledger enforces reservations, and the refusals here have the reason.
"""

import errno
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.files.folder_trees import list_folders
from leasehold_worker.host.cgroup_files import ControlFiles, KernelFiles
from leasehold_worker.host.cgroups import version_2_group
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import identify

logger = logging.getLogger(__name__)

PERIOD_US: Final = 100_000
"""The kernel's default period, in which a group may use its quota."""
LEAST_QUOTA_US: Final = 1000
"""The smallest quota that the kernel accepts."""

PROCESSES_LIMIT: Final = 32_768
"""Most processes and threads of a workload, where the kernel can count them. A fork bomb ends there."""

_AGENT: Final = "agent"
_PREFIX: Final = "workload-"
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", re.ASCII)
_MOVES: Final = 10
"""Rounds of moving the worker's processes, since a process may fork meanwhile."""
_REMEDY: Final = (
    "start the worker as a systemd service with Delegate=yes and DelegateSubgroup=agent, "
    "on a host with version 2 alone"
)


@final
class ResourceLimits:
    """The limits of this worker's workloads. Make it with :meth:`probe`.

    Attributes:
        cpu_refusal: Why CPU time is not enforced, in a sentence. Empty: it is.
        memory_refusal: Why memory is not enforced. Empty: it is.
    """

    def __init__(
        self, base: Path | None, cpu_refusal: str, memory_refusal: str, files: ControlFiles | None = None
    ) -> None:
        self._base = base
        self._files = files or KernelFiles()
        self.cpu_refusal = cpu_refusal
        self.memory_refusal = memory_refusal

    @classmethod
    def probe(cls, files: ControlFiles | None = None) -> "ResourceLimits":
        """Finds out which limits can be enforced, and prepares them. Call it once, before workloads start.

        It moves the worker's processes into a group of their own, and removes the groups of ended workloads.
        It never fails: the refusals have the reasons.
        """
        files = files or KernelFiles()
        group = version_2_group(os.getpid())
        if group is None:
            refusal = f"control groups of version 2 are not there: {_REMEDY}"
            return cls(None, refusal, refusal, files)
        base = group.parent if group.name == _AGENT else group
        try:
            return _prepare(base, files)
        except OSError as error:
            refusal = f"control group {base} can't be prepared: {error.strerror}; {_REMEDY}"
            return cls(None, refusal, refusal, files)

    def create(self, workload_id: str, cpu_millicores: int, memory_bytes: int) -> Path | None:
        """Creates the group of a workload. An existing group of an earlier run is left unchanged.

        Args:
            workload_id: The workload.
            cpu_millicores: CPU time in thousandths of a core. 0: no limit.
            memory_bytes: Memory. 0: no limit. The kernel kills a process beyond it.

        Returns:
            The group. None: the worker can't create any.

        Raises:
            OperationError: PERMISSION_OR_OS: the kernel refused. No group is left.
        """
        cpu_millicores = 0 if self.cpu_refusal else cpu_millicores
        memory_bytes = 0 if self.memory_refusal else memory_bytes
        if self._base is None:
            return None
        group = self._base / (_PREFIX + _checked(workload_id))
        if group.is_dir():
            return group
        try:
            self._files.make_group(group)
            if not self.cpu_refusal:
                self._files.write(group / "cpu.max", _cpu_max(cpu_millicores))
            if not self.memory_refusal:
                self._files.write(group / "memory.max", str(memory_bytes or "max"))
            with suppress(FileNotFoundError):  # the pids controller is off
                self._files.write(group / "pids.max", str(PROCESSES_LIMIT))
        except OSError as error:
            self.remove(group)
            raise _refused(group, error) from error
        return group

    def find(self, workload_id: str) -> Path | None:
        """The group of a workload, perhaps of an earlier run of the worker. None: it has none."""
        group = self._base / (_PREFIX + _checked(workload_id)) if self._base else None
        return group if group is not None and group.is_dir() else None

    def owns(self, group: Path) -> bool:
        """Whether a group is a workload's of this worker, with a changeable limit."""
        return group.parent == self._base and group.name.startswith(_PREFIX)

    def add(self, group: Path, pid: int) -> None:
        """Puts a process and its future descendants under a group's limits.

        A process that has ended meanwhile is ignored.

        Raises:
            OperationError: PERMISSION_OR_OS: the kernel refused.
        """
        try:
            self._files.write(group / "cgroup.procs", str(pid))
        except ProcessLookupError:
            return
        except OSError as error:
            raise _refused(group, error) from error

    def set_memory(self, group: Path, memory_bytes: int) -> bool:
        """Sets another memory limit, since a suspend moves device memory into a workload's host memory.

        Raise it before a suspend by the suspended bytes, and lower it after the restore.

        Returns:
            False: memory is not enforced; or more is in use, so that the kernel would kill, and the limit was
            left.

        Raises:
            OperationError: PERMISSION_OR_OS: the kernel refused.
        """
        if self.memory_refusal:
            return False
        try:
            if int(self._files.read(group / "memory.current")) > memory_bytes:
                return False
            self._files.write(group / "memory.max", str(memory_bytes))
        except (OSError, ValueError) as error:
            raise _refused(group, error) from error
        return True

    def kill(self, workload_id: str) -> None:
        """Kills the group of a workload, if there is one, in one step that no fork escapes.

        Kernels before 5.14 can't. Then, and if the kernel refuses, nothing is done.
        """
        group = self.find(workload_id)
        if group is None:
            return
        try:
            self._files.write(group / "cgroup.kill", "1")
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("the processes of control group %s can't be killed: %s", group, error.strerror)

    def remove(self, group: Path) -> bool:
        """Removes a group whose processes have ended, with its child groups.

        Returns:
            False: it still has processes. The next start of the worker tries again.
        """
        return _remove(group, self._files)


def _prepare(base: Path, files: ControlFiles) -> ResourceLimits:
    """Finds out the abilities of a base, moves the worker out of it, and turns its controllers on."""
    offered = files.read(base / "cgroup.controllers").split()
    refusals = {
        name: ""
        if name in offered
        else (f"the {name} controller of version 2 is not available in control group {base}: {_REMEDY}")
        for name in ("cpu", "memory")
    }
    if not all(refusals.values()):
        refusal = _why_not_ours(base, files) or _move_out(base, files)
        if refusal:
            refusals = dict.fromkeys(refusals, refusal)
    for name, refusal in refusals.items():
        if not refusal:
            refusals[name] = _turn_on(base, name, files)
    if all(refusals.values()):
        return ResourceLimits(None, refusals["cpu"], refusals["memory"], files)
    _turn_on(base, "pids", files)
    for group in sorted(base.glob(_PREFIX + "*")):
        _remove(group, files)
    return ResourceLimits(base, refusals["cpu"], refusals["memory"], files)


def _why_not_ours(base: Path, files: ControlFiles) -> str:
    if not (base / "cgroup.type").exists():
        return f"the worker runs in the root control group, {base}: {_REMEDY}"
    if not files.is_ours(base):
        return f"control group {base} is not delegated to the worker: {_REMEDY}"
    return ""


def _move_out(base: Path, files: ControlFiles) -> str:
    """Moves the worker, and its children, from the base to a child group. Other processes stay.

    Returns:
        Why that failed. Empty: the base has no process any more.
    """
    itself = identify(os.getpid())
    for _ in range(_MOVES):
        found = [int(line) for line in files.read(base / "cgroup.procs").split()]
        if not found:
            return ""
        ours = {process.pid for process in process_tree(itself)} if itself else set()
        if strangers := sorted(set(found) - ours):
            return f"the worker shares control group {base} with process {strangers[0]}: {_REMEDY}"
        files.make_group(base / _AGENT)
        for pid in found:
            try:
                files.write(base / _AGENT / "cgroup.procs", str(pid))
            except ProcessLookupError:
                continue
    return f"new processes appear in control group {base} faster than the worker can move them: {_REMEDY}"


def _turn_on(base: Path, controller: str, files: ControlFiles) -> str:
    try:
        files.write(base / "cgroup.subtree_control", f"+{controller}")
    except OSError as error:
        return f"the {controller} controller can't be turned on in control group {base}: {error.strerror}"
    return ""


def _remove(group: Path, files: ControlFiles) -> bool:
    for path in map(Path, reversed(list_folders(group))):
        try:
            files.remove_group(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EBUSY:
                logger.warning("control group %s can't be removed: %s", path, error.strerror)
            return False
    return True


def _cpu_max(cpu_millicores: int) -> str:
    quota_us = max(LEAST_QUOTA_US, cpu_millicores * PERIOD_US // 1000) if cpu_millicores else "max"
    return f"{quota_us} {PERIOD_US}"


def _checked(workload_id: str) -> str:
    """The id, which becomes the name of a folder.

    Raises:
        OperationError: INVALID_ARGUMENT: the id could lead out of the base.
    """
    if not _SAFE_ID.fullmatch(workload_id):
        raise OperationError(
            errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"workload id {workload_id!r} can't name a control group: use letters, digits, dots and dashes",
            {"field": "workload_id"},
        )
    return workload_id


def _refused(group: Path, error: Exception) -> OperationError:
    why = error.strerror if isinstance(error, OSError) else error
    return OperationError(
        errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
        f"the kernel refused the limits of control group {group}: {why}; check that no other "
        "program writes to the group",
    )
