"""Process trees: the descendants and related processes of a program, as far as they can be listed."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import (
    Pid,
    ProcessStat,
    read_process_file,
    read_stat,
)
from leasehold_worker.host.process_folders import PROC
from leasehold_worker.host.processes import (
    ProcessIdentity,
    _is_in_group,
    has_entries,
    has_real_user,
    held,
    identify,
    is_alive,
    send_signal,
)

FRESH_S: Final = 0.2
"""Shortest time after which the kernel may reuse a pid."""

_INIT: Final = Pid(1)
"""Pid that adopts orphans."""


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """The processes of a workload at one moment.

    Attributes:
        processes: Living processes, by start time.
        group_ids: Process groups with processes of the tree only.
        complete: No process of the tree was missed. A parent that ends during the listing can hide its child.
        listed_s: Start of the listing, of the monotonic clock.
    """

    processes: tuple[ProcessIdentity, ...]
    group_ids: frozenset[int]
    complete: bool
    listed_s: float
    _seen: Mapping[Pid, ProcessStat] = field(default_factory=dict, repr=False)
    """All processes of the host, for a scan soon after."""


def process_tree(root: ProcessIdentity) -> list[ProcessIdentity]:
    """A process with its descendants and its session, complete or not."""
    return list(scan_tree(root).processes)


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
    """The process, its descendants, its session, and all marked processes, by start time.

    A workload's first process leads its own session if the worker started it, so that orphans are found, too.

    Args:
        root: The process; it may have ended.
        mark: NAME=VALUE of a variable, or of several variables separated by NULs, as in /proc. Processes with
            all these variables belong to the tree. Empty: no process is marked. The function reads the
            environments of processes that are not known to belong. A process that is stuck in the kernel can
            block this read forever.
        without: Processes that are left out with their descendants, unless the root is among those.
        reaper: The parent of the root, which gets all orphans of the tree and does not belong to it. None:
            there is none.
        patience_s: How long processes are listed again because some ended before they were looked at.
        mark_uid: The real user whose marked processes count: every user can set the variable. Once the root
            has ended, processes in a session of its number must be of this user too, since the number may be
            that of another program's session by then. None: no such processes count.
        known: A tree of this host. If its scan began just now, only newer processes are read. A process that
            has ended since and is not reaped counts as alive.
    """
    listed_s = time.monotonic()
    deadline = listed_s + patience_s
    stats: dict[Pid, ProcessStat] = {}
    if known is not None and listed_s - known.listed_s < FRESH_S:
        listed_s, stats = known.listed_s, dict(known._seen)
    asked: dict[ProcessIdentity, bool] = {}
    while True:
        stats, missed, ended = _scan(stats, deadline)
        members, theirs = _descend(root, without, reaper, stats, mark_uid)
        if not mark:
            break
        # A process that inherited the variable is younger than the root.
        younger = {pid for pid, stat in stats.items() if stat.start_time_ticks >= root.start_time_ticks}
        marked, unread = _find_marked(
            (stats[pid] for pid in younger - members - theirs), ended, mark, mark_uid, asked
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
    stats: Mapping[Pid, ProcessStat],
    uid: int | None,
) -> tuple[set[Pid], set[Pid]]:
    """The processes of a tree that need no mark, and those of other trees."""
    below = _Descent(stats)
    fences = {other.pid for other in without if other != root and _is_in(other, stats)}
    alive = _is_in(root, stats)
    members = below.grow({root.pid} - fences, fences) if alive else set()
    if reaper is not None and reaper.pid != _INIT and _is_in(reaper, stats):
        members |= below.grow({reaper.pid}, fences | members) - {reaper.pid}
    # Init adopts the orphans of all programs, so a parent that is init proves nothing.
    theirs = below.grow(fences - {_INIT}, members) | fences
    leaders = {other.pid for other in without if other != root and not _is_reused(other, stats)}
    theirs |= below.grow({stat.pid for stat in stats.values() if stat.session_id in leaders}, members)
    if not _is_reused(root, stats):
        orphans = {pid for pid, stat in stats.items() if stat.session_id == root.pid}
        if root.pid not in stats:
            orphans = {pid for pid in orphans if has_real_user(pid, uid)}
        members |= below.grow(orphans - theirs, theirs)
    return members, theirs


def _find_marked(
    strangers: Iterable[ProcessStat],
    ended: Collection[Pid],
    mark: str,
    mark_uid: int | None,
    asked: dict[ProcessIdentity, bool],
) -> tuple[set[Pid], bool]:
    """The other processes with a mark, and whether the environment of one could not be read.

    A process that ended before that may have had the mark and a child, which another listing shows. One that
    is within execve(2) shows its environment later. Each environment is read once.
    """
    marked: set[Pid] = set()
    fresh: list[ProcessStat] = []
    unread = False
    for stat in strangers:
        if stat.over:
            unread = unread or (stat.pid in ended and has_real_user(stat.pid, mark_uid))
            continue
        identity = ProcessIdentity(stat.pid, stat.start_time_ticks)
        if identity not in asked:
            has_mark = has_real_user(stat.pid, mark_uid) and has_entries(stat.pid, mark)
            if has_mark is None and not _ended_since(stat):
                unread = True
                continue
            asked[identity] = bool(has_mark)
            if not has_mark:
                fresh.append(stat)
        if asked[identity]:
            marked.add(stat.pid)
    return marked, unread or any(map(_ended_since, fresh))


def _ended_since(stat: ProcessStat) -> bool:
    now = read_stat(stat.pid)
    return now is None or now.over or now.start_time_ticks != stat.start_time_ticks


class _Descent:
    """The children of each process."""

    def __init__(self, stats: Mapping[Pid, ProcessStat]) -> None:
        self._children = defaultdict[int, list[Pid]](list)
        for stat in stats.values():
            self._children[stat.parent_pid].append(stat.pid)

    def grow(self, pids: Iterable[Pid], fences: Collection[Pid]) -> set[Pid]:
        """Adds descendants, except those below the excluded processes only."""
        found: set[Pid] = set()
        left = list(pids)
        while left:
            pid = left.pop()
            if pid not in found:
                found.add(pid)
                left += [child for child in self._children[pid] if child not in fences]
        return found


def _is_in(identity: ProcessIdentity, stats: Mapping[Pid, ProcessStat]) -> bool:
    stat = stats.get(identity.pid)
    return stat is not None and stat.start_time_ticks == identity.start_time_ticks


def _is_reused(identity: ProcessIdentity, stats: Mapping[Pid, ProcessStat]) -> bool:
    """Whether the pid belongs to another process now."""
    return identity.pid in stats and not _is_in(identity, stats)


def _scan(stats: dict[Pid, ProcessStat], deadline: float) -> tuple[dict[Pid, ProcessStat], bool, set[Pid]]:
    """Every process; whether some vanished before they were looked at; and those that had ended by then.

    Processes that are known from before are not looked at again, unless they have lost their parent.

    The kernel lists processes by pid and gives new ones higher pids, so that a listing always has one process
    of a chain of forks. That process can end before its facts are read: then another listing shows its child.
    """
    unreadable: set[Pid] = set()
    while True:
        with os.scandir(PROC) as entries:
            listed = {Pid(int(entry.name)) for entry in entries if entry.name.isdigit()}
        stats = {pid: stat for pid, stat in stats.items() if pid in listed}
        # One whose parent has ended meanwhile has another parent now.
        unread = {
            pid for pid in listed - unreadable if pid not in stats or not _has_parent(stats[pid], listed)
        }
        missed = False
        ended: set[Pid] = set()
        for pid in sorted(unread, reverse=True):  # young processes tend to end first
            stat = read_stat(pid)
            if stat is None:  # it has ended, or the worker may not see it
                stats.pop(pid, None)
                unreadable.add(pid)
                missed = True
                continue
            if stat.over and pid not in stats:
                ended.add(pid)
            stats[pid] = stat
        if not (missed or ended) or time.monotonic() > deadline:
            return stats, missed, ended


def _has_parent(stat: ProcessStat, listed: Collection[int]) -> bool:
    return stat.parent_pid in listed or stat.parent_pid == 0


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


def child_pids(parent: ProcessIdentity) -> set[Pid]:
    """The pids of the children of a process that has one thread, with those that it has not waited for."""
    return {Pid(int(text)) for text in read_process_file(parent.pid, f"task/{parent.pid}/children").split()}


def kill_children(parent: ProcessIdentity) -> set[ProcessIdentity]:
    """Sends SIGKILL to the children of a process that has one thread. Returns those that lived."""
    killed: set[ProcessIdentity] = set()
    if not is_alive(parent):
        return killed
    for pid in child_pids(parent):
        child = identify(pid)
        if child is None:
            continue
        with suppress(OperationError), held(child) as pidfd:
            stat = read_stat(child.pid)
            if pidfd is not None and stat is not None and stat.parent_pid == parent.pid:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed.add(child)
    return killed
