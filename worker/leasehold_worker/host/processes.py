"""Processes of this host: identity, relations, and facts from /proc."""

import errno
import logging
import os
import pwd
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.host import cgroups
from leasehold_worker.host.process_files import (
    Pid,
    environment_in_memory,
    may_have_environment,
    number,
    read_process_file,
    read_stat,
    read_stat_of,
    read_status,
)
from leasehold_worker.host.process_folders import PROC, facts_folder

logger = logging.getLogger(__name__)


ENDING_S: Final = 0.5
"""Time to end for a process that the driver refuses to operate on."""

DYING_S: Final = 5.0
"""Time to end for a process whose state the driver does not report after a failed operation."""


HOLD_AGAIN_S: Final = 1.0
"""Wait before another attempt to monitor a process, after a lack of descriptors or memory."""


_NO_PROCESS: Final = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
"""Errors of pidfd_open(2) for an unused pid; the last two are for a thread's id, by kernel."""

ANCESTORS_LIMIT: Final = 128
"""Ancestors of a process that are read. A user can have chains of as many processes as its limits permit."""

COMMAND_LINE_LIMIT: Final = 65_536
"""Bytes of a command line that are used."""

_user_names: Final[dict[int, str]] = {}
"""Known user names, by user id."""

_PF_EXITING: Final = 0x4
_PF_SIGNALED: Final = 0x400
"""Flags of a process that exits, and of one that a signal ends, set before the core dump (linux/sched.h)."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, identified for good: the kernel reuses pids, but not with the same start time.

    Attributes:
        pid: Process id. Never a thread id, which the driver would accept as well.
        start_time_ticks: Start time in clock ticks since boot.
    """

    pid: Pid
    start_time_ticks: int


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the process with this pid. None: there is none, or it is a zombie or a thread.

    A thread's id works as a pid everywhere in /proc, and the driver takes it too (NVIDIA/cuda-checkpoint
    issue 41).
    """
    stat = read_stat(pid)
    if stat is None or stat.over or read_status(pid).get("Tgid") != str(pid):
        return None
    return ProcessIdentity(stat.pid, stat.start_time_ticks)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether that very process is alive."""
    return identify(identity.pid) == identity


def may_be_parent(parent: ProcessIdentity, child: ProcessIdentity) -> bool:
    """Whether a process is the parent of another, or may have been since the other has ended."""
    stat = read_stat(child.pid)
    gone = stat is None or stat.start_time_ticks != child.start_time_ticks
    return gone or (stat is not None and stat.parent_pid == parent.pid)


def is_zombie(pid: int) -> bool:
    """Whether the process with this pid has ended without being reaped."""
    stat = read_stat(pid)
    return stat is not None and stat.over


def why_blocked(identity: ProcessIdentity) -> str | None:
    """Why the process can't answer the driver, whose calls would then block forever. None: it can.

    The driver talks to a thread inside the process, which must be able to run.
    """
    if read_stat(identity.pid) is None:
        return None
    thread = read_stat_of(facts_folder(identity.pid))
    if thread is not None and thread.state in "Tt":
        return {"T": "stopped by a signal", "t": "stopped by a debugger"}[thread.state]
    tracer = read_status(identity.pid).get("TracerPid", "0")
    if tracer != "0":
        return f"traced by process {tracer}"
    return "frozen by its control group" if cgroups.is_frozen(identity.pid) else None


def tracer(identity: ProcessIdentity) -> tuple[int, str] | None:
    """Pid and name of the process that traces another. None: there is none."""
    pid = number(read_status(identity.pid).get("TracerPid", ""))
    return (pid, read_status(Pid(pid)).get("Name", "")) if pid else None


def catches(identity: ProcessIdentity, signal_number: int) -> bool:
    """Whether the process has a handler for a signal."""
    mask = number(read_status(identity.pid).get("SigCgt", ""), 16) or 0
    return bool(mask >> (signal_number - 1) & 1)


def has_variable(identity: ProcessIdentity, name: str) -> bool:
    """Whether a process was started with a variable in its environment. False if that can't be read."""
    return f"\0{name}=".encode() in _environment(identity.pid)


def has_entries(pid: int, mark: str) -> bool | None:
    """Whether a process was started with a mark. None: it has an environment, which can't be read yet."""
    environment = _environment(pid)
    if environment == b"\0\0" and may_have_environment(pid):
        return None
    return all(b"\0%b\0" % entry in environment for entry in mark.encode().split(b"\0"))


def _environment(pid: int) -> bytes:
    """The environment, with a NUL around each entry. As a list, it could take far more memory."""
    content = read_process_file(pid, "environ")
    if not content and os.geteuid() != 0:
        content = environment_in_memory(pid)
    return b"\0%b\0" % content


def variable_of(pid: int, name: str) -> str:
    """A variable of a process's first environment. Empty: it has none, or can't be read."""
    _, _, rest = _environment(pid).partition(f"\0{name}=".encode())
    return rest.partition(b"\0")[0].decode(errors="replace")


def lineage(pid: int) -> Iterator[tuple[ProcessIdentity, int]]:
    """The process and its next ancestors, each with the id of its session. Zombies are left out.

    Pids may be reused during the call, so that a chain of them can lead back to its start.
    """
    for _ in range(ANCESTORS_LIMIT + 1):
        stat = read_stat(pid) if pid > 0 else None
        if stat is None:
            return
        if not stat.over:
            yield ProcessIdentity(stat.pid, stat.start_time_ticks), stat.session_id
        pid = stat.parent_pid


def user_id(pid: int) -> int | None:
    """The effective user id of a process. None: it is gone."""
    uids = read_status(pid).get("Uid", "").split()
    return number(uids[1]) if len(uids) > 1 else None


def user_ids(pid: int) -> tuple[int, ...]:
    """The effective, the real and the saved user id of a process, which may take any of them. Empty: gone."""
    real, effective, saved = (read_status(pid).get("Uid", "").split() + [""] * 3)[:3]
    found = (number(effective), number(real), number(saved))
    return tuple(dict.fromkeys(uid for uid in found if uid is not None))


def has_real_user(pid: int, uid: int | None) -> bool:
    """Whether a process has this real user id, as in kill(2): a setuid program does not change it.

    False if the process is gone or the user id is None.
    """
    uids = read_status(pid).get("Uid", "").split()
    return uid is not None and bool(uids) and number(uids[0]) == uid


def user_name(uid: int | None) -> str:
    """The name of a user, or its number if it has none. Empty for None.

    The first lookup may ask a directory service, which can take long.
    """
    if uid is None:
        return ""
    if uid not in _user_names:
        try:
            _user_names[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)
    return _user_names[uid]


def command_line(pid: int) -> list[str]:
    """Program and arguments of a process. Empty: it is gone, or a thread of the kernel."""
    line = read_process_file(pid, "cmdline")[:COMMAND_LINE_LIMIT]
    return [part.decode(errors="replace") for part in line.rstrip(b"\0").split(b"\0")] if line else []


def missing_device_nodes(identity: ProcessIdentity, nodes: Iterable[str]) -> list[str]:
    """The device nodes of this host, such as /dev/nvidia0, that a process can't see in its mount namespace.

    Nodes that the worker does not see either are ignored, and so is a root that it can't read.
    """
    root = facts_folder(identity.pid) / "root"
    try:
        return [node for node in nodes if Path(node).exists() and not (root / node.lstrip("/")).exists()]
    except PermissionError:
        return []


@contextmanager
def held(identity: ProcessIdentity) -> Iterator[int | None]:
    """Opens a pidfd of the process, which reports its end, and through which no other process is signalled.

    After its end its pid can be reused, even while the pidfd is open.

    Yields:
        The pidfd, readable once the process has ended; None if the process has ended.

    Raises:
        OperationError: PERMISSION_OR_OS, after a lack of descriptors or memory. The process may be alive.
    """
    pidfd = None
    try:
        try:
            pidfd = os.pidfd_open(identity.pid)
            alive = is_alive(identity)
        except OSError as error:
            if error.errno not in _NO_PROCESS:
                raise OperationError(
                    errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
                    f"process {identity.pid} can't be opened ({error.strerror}): try again "
                    "once the worker's host has free descriptors and memory",
                    {"pid": str(identity.pid)},
                ) from error
            alive = False
        yield pidfd if alive else None
    finally:
        if pidfd is not None:
            os.close(pidfd)


async def wait_ended(identity: ProcessIdentity) -> None:
    """Waits until that very process has ended, child or not.

    A process that can't be monitored for now counts as alive: the call tries again.
    """
    while True:
        try:
            with held(identity) as pidfd:
                if pidfd is None:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(pidfd)
                return
        except (OperationError, OSError) as error:
            logger.warning("can't wait for the end of process %d: %s", identity.pid, error)
        await trio.sleep(HOLD_AGAIN_S)


async def cancel_at_end(identity: ProcessIdentity, scope: trio.CancelScope) -> None:
    """Cancels a scope at the end of a process."""
    await wait_ended(identity)
    scope.cancel()


async def ends_soon(pidfd: int, pid: int, within_s: float = ENDING_S) -> bool:
    """Whether the process behind the pidfd has ended, or ends within a time.

    The driver refuses a dying process before it is gone, for as long as the kernel takes for the core dump
    (NVIDIA/cuda-checkpoint issue 58).
    """
    if has_ended(pidfd):
        return True
    with trio.move_on_after(within_s):
        await trio.lowlevel.wait_readable(pidfd)
        return True
    return is_ending(pid)


async def will_end(identity: ProcessIdentity, within_s: float = ENDING_S) -> bool:
    """Like :func:`ends_soon`. A process that can't be opened counts as alive."""
    with suppress(OperationError), held(identity) as pidfd:
        return pidfd is None or await ends_soon(pidfd, identity.pid, within_s)
    return False


def is_ending(pid: int) -> bool:
    """Whether a process is ending, while the kernel still writes its core dump or frees its memory."""
    stat = read_stat_of(facts_folder(pid))  # the first thread may end alone
    return stat is not None and bool(stat.flags & (_PF_EXITING | _PF_SIGNALED))


def has_ended(pidfd: int) -> bool:
    """Whether the process behind the pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def send_signal(identity: ProcessIdentity, signal_number: int) -> None:
    """Signals that very process; does nothing if it has ended.

    Raises:
        OperationError: PERMISSION_OR_OS: the process could not be opened, or belongs to another user and this
            worker lacks CAP_KILL. It was not signalled.
    """
    with held(identity) as pidfd:
        if pidfd is None:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal_number)
        except ProcessLookupError:
            return
        except PermissionError:
            raise OperationError(
                errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
                f"the worker may not signal process {identity.pid} of another user: start the worker as root "
                "or with CAP_KILL",
                {"pid": str(identity.pid)},
            ) from None


def _is_in_group(identity: ProcessIdentity, group_id: int) -> bool:
    stat = read_stat(identity.pid)
    ours = stat is not None and stat.start_time_ticks == identity.start_time_ticks
    return ours and stat is not None and stat.group_id == group_id


def boot_id() -> str:
    """The kernel's boot id: pids and start times are valid for one boot only."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def memory_bytes(field: str) -> int | None:
    """A field of /proc/meminfo in bytes, such as MemAvailable. None: the kernel has none."""
    for line in (PROC / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
