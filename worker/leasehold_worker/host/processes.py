"""Processes of this host: who they are, which belong together, and facts from /proc."""

import errno
import logging
import os
import pwd
import select
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NewType

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.host import cgroups
from leasehold_worker.host.process_folders import PROC, facts_folder, stat_fields
from leasehold_worker.host.process_folders import has_ended as fields_show_end

logger = logging.getLogger(__name__)

Pid = NewType("Pid", int)

ENDING_S: Final = 0.5
"""How long a process that the driver refuses may take to be gone."""

DYING_S: Final = 5.0
"""The same for a process whose state the driver does not tell either, once an operation has failed by it."""

FRESH_S: Final = 0.2
"""How long the processes of a host certainly take until the kernel uses an id again that has become free."""

HOLD_AGAIN_S: Final = 1.0
"""When a process is watched again that could not be held, for want of descriptors or memory."""

READ_BYTES: Final = 65_536
"""How much of a file of ``/proc`` is read at once."""

_PROC = PROC

_OF_MEMORY: Final = frozenset({"environ", "cmdline"})
"""Files that are empty for a process whose first thread has ended."""

_NO_PROCESS: Final = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
"""What pidfd_open(2) says of a pid that nobody has; the last two are for a thread's id, by kernel."""

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that tell of a shortage on this host, and nothing about the process that was read."""

_user_names: Final[dict[int, str]] = {}
"""Names that were found, by user id."""

_PF_EXITING: Final = 0x4
_PF_SIGNALED: Final = 0x400
"""Flags of a process that exits, and of one that a signal ends, set before the core dump (linux/sched.h)."""

_INIT: Final = Pid(1)
"""Whom orphans are given to."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, named for good: the kernel reuses pids, but not with the same start time.

    Attributes:
        pid: Process id. Never a thread id, which the driver would accept as well.
        start_time_ticks: Start time in clock ticks since boot.
    """

    pid: Pid
    start_time_ticks: int


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: Pid
    state: str
    over: bool
    """All its threads have ended: it is a zombie, or about to be reaped."""
    parent_pid: int
    group_id: int
    session_id: int
    flags: int
    start_time_ticks: int


def _read_stat(pid: int) -> _Stat | None:
    """Reads /proc/PID/stat; None where there is none to be seen (proc(5) numbers its fields from 1)."""
    return _parse_stat(pid, _read(pid, "stat"))


def _read_stat_of(folder: Path) -> _Stat | None:
    """The stat of a thread; None where the thread has ended."""
    try:
        return _parse_stat(int(folder.name), (folder / "stat").read_bytes())
    except OSError:
        return None


def _parse_stat(pid: int, content: bytes) -> _Stat | None:
    text = content.decode(errors="replace")
    if not text:
        return None
    try:
        fields = stat_fields(text)
        parent, group, session, flags, start = (int(fields[place]) for place in (1, 2, 3, 6, 19))
        return _Stat(Pid(pid), fields[0], fields_show_end(fields), parent, group, session, flags, start)
    except (ValueError, IndexError):
        return None


def _read_status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; none where there is none to be seen."""
    text = _read(pid, "status").decode(errors="replace")
    # A program's name is among them, and may hold what else ends a line for Python.
    return dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)


def _number(text: str, base: int = 10) -> int | None:
    """A number of /proc. None: there is none."""
    try:
        return int(text, base)
    except ValueError:
        return None


def _read(pid: int, name: str) -> bytes:
    """A file of a process. Empty where there is none, or where it is not for us (hidepid, ptrace_scope).

    Raises:
        OSError: This host is short of descriptors or memory: that says nothing of the process.
    """
    try:
        # A scan reads every process of the host: a Path and a file object take as long as the kernel does.
        return _read_file(f"{facts_folder(pid) if name in _OF_MEMORY else f'{_PROC}/{pid}'}/{name}")
    except OSError as error:
        if error.errno in _SHORT:
            raise
        return b""


def _read_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(partial(os.read, descriptor, READ_BYTES), b""))
    finally:
        os.close(descriptor)


def identify(pid: int) -> ProcessIdentity | None:
    """Names the process that has this pid now. None: there is none, it is a zombie, or it is a thread.

    A thread's id works as a pid everywhere in /proc, and the driver takes it too (NVIDIA/cuda-checkpoint
    issue 41).
    """
    stat = _read_stat(pid)
    if stat is None or stat.over or _read_status(pid).get("Tgid") != str(pid):
        return None
    return ProcessIdentity(stat.pid, stat.start_time_ticks)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether that very process still runs."""
    return identify(identity.pid) == identity


def may_be_parent(parent: ProcessIdentity, child: ProcessIdentity) -> bool:
    """Whether a process is the parent of another, or that can't be told since the other is gone."""
    stat = _read_stat(child.pid)
    gone = stat is None or stat.start_time_ticks != child.start_time_ticks
    return gone or (stat is not None and stat.parent_pid == parent.pid)


def is_zombie(pid: int) -> bool:
    """Whether the process with this pid has ended, and is not reaped."""
    stat = _read_stat(pid)
    return stat is not None and stat.over


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """The processes of a workload at one moment.

    Attributes:
        processes: Those that live, by start time.
        group_ids: Process groups that hold processes of the tree alone.
        complete: No process of the tree can have been missed, because one that started it ended meanwhile.
        listed_s: When the listing began, of the monotonic clock.
    """

    processes: tuple[ProcessIdentity, ...]
    group_ids: frozenset[int]
    complete: bool
    listed_s: float
    _seen: Mapping[Pid, _Stat] = field(default_factory=dict, repr=False)
    """All processes of the host, for a scan soon after."""


def process_tree(
    root: ProcessIdentity,
    mark: str = "",
    without: Collection[ProcessIdentity] = (),
    *,
    mark_uid: int | None = None,
) -> list[ProcessIdentity]:
    """The processes of :func:`scan_tree`, be it complete or not."""
    return list(scan_tree(root, mark, without, mark_uid=mark_uid).processes)


def scan_tree(
    root: ProcessIdentity,
    mark: str = "",
    without: Collection[ProcessIdentity] = (),
    reaper: ProcessIdentity | None = None,
    *,
    patience_s: float = 0.0,
    mark_uid: int | None = None,
    known: ProcessTree | None = None,
) -> ProcessTree:
    """The process, its descendants, all of the session that it leads, and all marked ones, by start time.

    A workload's first process leads a session of its own where we started it, so that orphans are found too.

    Args:
        root: The process; it may have ended.
        mark: NAME=VALUE of a variable, or of several with NULs between, as the kernel has them: processes
            that were started with all of them belong to it. Empty: none do. The environment is read only of
            those that are not known otherwise; a process that is stuck in the kernel can make that wait for
            ever.
        without: Processes that are left out with what is below them, unless the root is there too.
        reaper: The parent of the root, which gets all orphans of the tree and does not belong to it. None:
            nobody does.
        patience_s: How long processes are listed again because some ended before they were looked at.
        mark_uid: The real user whose marked processes count: every user can set the variable. None: no
            marked process counts.
        known: A tree of this host. If its scan began just now, only processes that are new since are read;
            one that has ended since and is not reaped counts as alive.
    """
    listed_s = time.monotonic()
    deadline = listed_s + patience_s
    stats: dict[Pid, _Stat] = {}
    if known is not None and listed_s - known.listed_s < FRESH_S:
        listed_s, stats = known.listed_s, dict(known._seen)
    asked: dict[ProcessIdentity, bool] = {}
    while True:
        stats, missed, ended = _scan(stats, deadline)
        members, theirs = _descend(root, without, reaper, stats)
        if not mark:
            break
        # Whoever inherited the variable came after the first that had it.
        younger = {pid for pid, stat in stats.items() if stat.start_time_ticks >= root.start_time_ticks}
        marked, unread = _find_marked(
            (stats[pid] for pid in younger - members - theirs), mark, mark_uid, asked
        )
        members |= _Descent(stats).grow(marked, theirs)
        if not unread or time.monotonic() > deadline:
            missed |= unread
            break
    found = [stats[pid] for pid in members if not stats[pid].over]
    found.sort(key=lambda stat: (stat.start_time_ticks, stat.pid))
    outside = {stat.group_id for pid, stat in stats.items() if pid not in members and not stat.over}
    complete = not missed and not ended & members
    # Where a stranger may have been missed, only groups of the tree's own session are its own for certain.
    sure = [stat for stat in found if complete or stat.session_id == root.pid]
    return ProcessTree(
        tuple(ProcessIdentity(stat.pid, stat.start_time_ticks) for stat in found),
        frozenset(stat.group_id for stat in sure) - outside,
        complete,
        listed_s,
        stats,
    )


def _descend(
    root: ProcessIdentity,
    without: Collection[ProcessIdentity],
    reaper: ProcessIdentity | None,
    stats: Mapping[Pid, _Stat],
) -> tuple[set[Pid], set[Pid]]:
    """The processes of a tree that are known without their mark, and those that belong to others."""
    below = _Descent(stats)
    fences = {other.pid for other in without if other != root and _is_in(other, stats)}
    alive = _is_in(root, stats)
    members = below.grow({root.pid} - fences, fences) if alive else set()
    if reaper is not None and reaper.pid != _INIT and _is_in(reaper, stats):
        members |= below.grow({reaper.pid}, fences | members) - {reaper.pid}
    # Init is given orphans of everybody, so that what is below it says nothing.
    theirs = below.grow(fences - {_INIT}, members) | fences
    leaders = {other.pid for other in without if other != root and not _is_reused(other, stats)}
    theirs |= below.grow({stat.pid for stat in stats.values() if stat.session_id in leaders}, members)
    if not _is_reused(root, stats):
        orphans = {pid for pid, stat in stats.items() if stat.session_id == root.pid}
        members |= below.grow(orphans - theirs, theirs)
    return members, theirs


def _find_marked(
    strangers: Iterable[_Stat], mark: str, mark_uid: int | None, asked: dict[ProcessIdentity, bool]
) -> tuple[set[Pid], bool]:
    """The strangers with a mark, and whether one ended before its environment was read.

    That one may have had the mark, and a child: another listing shows the child. Each process is asked once.
    """
    marked: set[Pid] = set()
    fresh: list[_Stat] = []
    for stat in strangers:
        identity = ProcessIdentity(stat.pid, stat.start_time_ticks)
        if identity not in asked:
            asked[identity] = has_real_user(stat.pid, mark_uid) and _has_entries(stat.pid, mark)
            if not (asked[identity] or stat.over):
                fresh.append(stat)
        if asked[identity]:
            marked.add(stat.pid)
    return marked, any(map(_ended_since, fresh))


def _ended_since(stat: _Stat) -> bool:
    now = _read_stat(stat.pid)
    return now is None or now.over or now.start_time_ticks != stat.start_time_ticks


class _Descent:
    """The children of each process."""

    def __init__(self, stats: Mapping[Pid, _Stat]) -> None:
        self._children = defaultdict[int, list[Pid]](list)
        for stat in stats.values():
            self._children[stat.parent_pid].append(stat.pid)

    def grow(self, pids: Iterable[Pid], fences: Collection[Pid]) -> set[Pid]:
        """The processes and their descendants, short of the fences and what is only below them."""
        found: set[Pid] = set()
        left = list(pids)
        while left:
            pid = left.pop()
            if pid not in found:
                found.add(pid)
                left += [child for child in self._children[pid] if child not in fences]
        return found


def _is_in(identity: ProcessIdentity, stats: Mapping[Pid, _Stat]) -> bool:
    stat = stats.get(identity.pid)
    return stat is not None and stat.start_time_ticks == identity.start_time_ticks


def _is_reused(identity: ProcessIdentity, stats: Mapping[Pid, _Stat]) -> bool:
    """Whether another process has its pid by now."""
    return identity.pid in stats and not _is_in(identity, stats)


def _scan(stats: dict[Pid, _Stat], deadline: float) -> tuple[dict[Pid, _Stat], bool, set[Pid]]:
    """Every process; whether some vanished before they were looked at; and those that had ended by then.

    Processes that are known from before are not looked at again, unless they have lost their parent.

    The kernel lists processes by pid and gives new ones higher pids, so that a listing always has one process
    of a chain of forks. That process can end before its facts are read: then another listing shows its child.
    """
    unreadable: set[Pid] = set()
    while True:
        with os.scandir(_PROC) as entries:
            listed = {Pid(int(entry.name)) for entry in entries if entry.name.isdigit()}
        stats = {pid: stat for pid, stat in stats.items() if pid in listed}
        # One whose parent has ended meanwhile has another parent now.
        unread = {
            pid for pid in listed - unreadable if pid not in stats or not _has_parent(stats[pid], listed)
        }
        missed = False
        ended: set[Pid] = set()
        for pid in sorted(unread, reverse=True):  # the youngest are the first to end
            stat = _read_stat(pid)
            if stat is None:  # it has ended, or it is not for us to see
                stats.pop(pid, None)
                unreadable.add(pid)
                missed = True
                continue
            if stat.over and pid not in stats:
                ended.add(pid)
            stats[pid] = stat
        if not (missed or ended) or time.monotonic() > deadline:
            return stats, missed, ended


def _has_parent(stat: _Stat, listed: Collection[int]) -> bool:
    return stat.parent_pid in listed or stat.parent_pid == 0


def why_blocked(identity: ProcessIdentity) -> str | None:
    """Why the process can't answer the driver, whose calls would then block for ever. None: it can.

    The driver talks to a thread inside the process, which must be able to run.
    """
    if _read_stat(identity.pid) is None:
        return None
    thread = _read_stat_of(facts_folder(identity.pid))
    if thread is not None and thread.state in "Tt":
        return {"T": "stopped by a signal", "t": "stopped by a debugger"}[thread.state]
    tracer = _read_status(identity.pid).get("TracerPid", "0")
    if tracer != "0":
        return f"traced by process {tracer}"
    return "frozen by its control group" if cgroups.is_frozen(identity.pid) else None


def tracer(identity: ProcessIdentity) -> tuple[int, str] | None:
    """Pid and name of who traces a process. None: nobody does."""
    pid = _number(_read_status(identity.pid).get("TracerPid", ""))
    return (pid, _read_status(Pid(pid)).get("Name", "")) if pid else None


def catches(identity: ProcessIdentity, signal_number: int) -> bool:
    """Whether the process has a handler for a signal, rather than ending by it."""
    mask = _number(_read_status(identity.pid).get("SigCgt", ""), 16) or 0
    return bool(mask >> (signal_number - 1) & 1)


def has_variable(identity: ProcessIdentity, name: str) -> bool:
    """Whether a process was started with a variable in its environment; no where that can't be read."""
    return any(entry.startswith(name.encode() + b"=") for entry in _environment(identity.pid))


def _has_entries(pid: int, mark: str) -> bool:
    return set(mark.encode().split(b"\0")).issubset(_environment(pid))


def _environment(pid: int) -> list[bytes]:
    return _read(pid, "environ").split(b"\0")


def variable_of(pid: int, name: str) -> str:
    """A variable that a process was started with. Empty: it was not, or that can't be read."""
    start = name.encode() + b"="
    values = (entry[len(start) :] for entry in _environment(pid) if entry.startswith(start))
    return next(values, b"").decode(errors="replace")


def lineage(pid: int) -> Iterator[tuple[ProcessIdentity, int]]:
    """The process and its ancestors, each with the id of its session. Zombies are left out.

    Pids are used again while this reads them, so that a chain of them can lead back to where it began.
    """
    seen: set[int] = set()
    while pid > 0 and pid not in seen and (stat := _read_stat(pid)) is not None:
        seen.add(pid)
        if not stat.over:
            yield ProcessIdentity(stat.pid, stat.start_time_ticks), stat.session_id
        pid = stat.parent_pid


def user_id(pid: int) -> int | None:
    """The effective user id of a process. None: it is gone."""
    uids = _read_status(pid).get("Uid", "").split()
    return _number(uids[1]) if len(uids) > 1 else None


def has_real_user(pid: int, uid: int | None) -> bool:
    """Whether a process has this real user id, as kill(2) asks: a setuid program does not change it.

    False if the process is gone or the user id is None.
    """
    uids = _read_status(pid).get("Uid", "").split()
    return uid is not None and bool(uids) and _number(uids[0]) == uid


def user_name(uid: int | None) -> str:
    """The name of a user, or its number where it has none. Empty for None.

    The first time it may have to be asked of a directory service, which can take long.
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
    line = _read(pid, "cmdline")
    return [part.decode(errors="replace") for part in line.rstrip(b"\0").split(b"\0")] if line else []


def missing_device_nodes(identity: ProcessIdentity, nodes: Iterable[str]) -> list[str]:
    """Which device nodes of this host, such as /dev/nvidia0, a process can't see in its mount namespace.

    A node that is not there for the worker either says nothing, and neither does a root that is shut to it.
    """
    root = facts_folder(identity.pid) / "root"
    try:
        return [node for node in nodes if Path(node).exists() and not (root / node.lstrip("/")).exists()]
    except PermissionError:
        return []


@contextmanager
def held(identity: ProcessIdentity) -> Iterator[int | None]:
    """Holds the process by a pidfd, which tells its end, and through which no other process is signalled.

    Once it has ended, its pid can come to mean another process, though the pidfd is held.

    Yields:
        The pidfd, readable once the process has ended; None where the pid is free, or means another by now.

    Raises:
        OperationError: PERMISSION_OR_OS, for want of descriptors or memory. The process may well live.
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
                    f"process {identity.pid} can't be held ({error.strerror}): try again once the worker's "
                    "host has free descriptors and memory",
                    {"pid": str(identity.pid)},
                ) from error
            alive = False
        yield pidfd if alive else None
    finally:
        if pidfd is not None:
            os.close(pidfd)


async def wait_ended(identity: ProcessIdentity) -> None:
    """Waits until that very process has ended; it need not be a child.

    One that can't be watched for the moment counts as alive: it is tried again.
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
            logger.warning("the end of process %d can't be waited for: %s", identity.pid, error)
        await trio.sleep(HOLD_AGAIN_S)


async def ends_soon(pidfd: int, pid: int, within_s: float = ENDING_S) -> bool:
    """Whether the process behind the pidfd has ended, does so within a time, or is ending by then.

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
    """As :func:`ends_soon`. A process that can't be held counts as alive."""
    with suppress(OperationError), held(identity) as pidfd:
        return pidfd is None or await ends_soon(pidfd, identity.pid, within_s)
    return False


def is_ending(pid: int) -> bool:
    """Whether a process runs no more, though the kernel still writes its core dump or frees its memory."""
    stat = _read_stat_of(facts_folder(pid))  # the first thread may end alone
    return stat is not None and bool(stat.flags & (_PF_EXITING | _PF_SIGNALED))


def has_ended(pidfd: int) -> bool:
    """Whether the process behind the pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def send_signal(identity: ProcessIdentity, signal_number: int) -> None:
    """Signals that very process; does nothing where it is gone.

    Raises:
        OperationError: It could not be held, and was not signalled.
    """
    with held(identity) as pidfd:
        if pidfd is None:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal_number)
        except ProcessLookupError:
            return


def _is_in_group(identity: ProcessIdentity, group_id: int) -> bool:
    stat = _read_stat(identity.pid)
    ours = stat is not None and stat.start_time_ticks == identity.start_time_ticks
    return ours and stat is not None and stat.group_id == group_id


def kill_tree(tree: ProcessTree) -> None:
    """Sends SIGKILL to the processes of a tree, and to its process groups, which no fork can escape.

    Ids of groups are used again. So a group of a tree that was listed some time ago is killed only if one of
    the listed processes is in it still.

    Raises:
        OperationError: A process could not be held, and was not signalled.
    """
    is_fresh = time.monotonic() - tree.listed_s < FRESH_S
    for group_id in tree.group_ids:
        if is_fresh or any(_is_in_group(identity, group_id) for identity in tree.processes):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group_id, signal.SIGKILL)
    for identity in tree.processes:
        send_signal(identity, signal.SIGKILL)


def kill_children(parent: ProcessIdentity) -> set[ProcessIdentity]:
    """Sends SIGKILL to the children of a process that has one thread. Returns those that lived."""
    killed: set[ProcessIdentity] = set()
    if not is_alive(parent):
        return killed
    for text in _read(parent.pid, f"task/{parent.pid}/children").split():
        child = identify(int(text))
        if child is None:
            continue
        with suppress(OperationError), held(child) as pidfd:
            stat = _read_stat(child.pid)
            if pidfd is not None and stat is not None and stat.parent_pid == parent.pid:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed.add(child)
    return killed


def boot_id() -> str:
    """The kernel's boot id: pids and start times mean nothing across boots."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def memory_bytes(field: str) -> int | None:
    """A field of /proc/meminfo in bytes, such as MemAvailable. None: the kernel doesn't say."""
    for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
