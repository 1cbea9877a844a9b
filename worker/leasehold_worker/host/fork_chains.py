"""Chains of forks: each process starts the next one and exits before a listing of all processes finds it.

The kernel tells the pid that it gave last (proc(5), loadavg). That is the end of the chain, and the one
process whose death ends it.
"""

import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import number
from leasehold_worker.host.process_folders import PROC
from leasehold_worker.host.processes import (
    ProcessIdentity,
    has_entries,
    has_real_user,
    held,
    identify,
    lineage,
)

QUIET_S: Final = 0.02
"""Time without a new process after which a chain counts as ended."""


def kill_newest(is_member: Callable[[ProcessIdentity], bool], limit_s: float) -> set[ProcessIdentity]:
    """Sends SIGKILL to the newest process of the host, again and again, as long as it is a member of a tree.

    Args:
        is_member: Whether a process is one of the tree. It is asked about the processes of all users.
        limit_s: Longest time. The function returns sooner if no process starts for QUIET_S.

    Returns:
        The processes that were killed.
    """
    killed: set[ProcessIdentity] = set()
    last = None
    now = changed = time.monotonic()
    deadline = now + limit_s
    while now < min(deadline, changed + QUIET_S):
        newest = newest_pid()
        if newest is None:
            return killed
        now = time.monotonic()
        if newest == last:
            continue
        last, changed = newest, now
        identity = identify(newest)
        if identity is None:
            continue
        with suppress(OperationError), held(identity) as pidfd:
            if pidfd is not None and is_member(identity):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed.add(identity)
    return killed


def newest_pid() -> int | None:
    """The pid that the kernel gave last, in the worker's namespace of pids. None: it does not tell."""
    try:
        text = (PROC / "loadavg").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return number(text.rpartition(" ")[2])


def is_related(
    identity: ProcessIdentity,
    relatives: Collection[ProcessIdentity],
    strangers: Collection[ProcessIdentity],
    mark: str,
    mark_uid: int | None,
) -> bool:
    """Whether a process descends from a relative, or has the mark and descends from no stranger.

    The nearest ancestor decides. A process in a session of a stranger counts as its descendant.

    Args:
        identity: The process; one of the relatives is related.
        relatives: Processes of a tree.
        strangers: Processes of others.
        mark: As for :func:`~leasehold_worker.host.process_trees.scan_tree`. Empty: no process has it.
        mark_uid: The real user whose marked processes count. None: no marked process counts.
    """
    leaders = {stranger.pid for stranger in strangers}
    for ancestor, session_id in lineage(identity.pid):
        if ancestor in relatives:
            return True
        if ancestor in strangers or session_id in leaders:
            return False
    return bool(mark) and has_real_user(identity.pid, mark_uid) and bool(has_entries(identity.pid, mark))
