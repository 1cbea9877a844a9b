"""Processes of this host: who they are, which belong together, and facts from /proc."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

Pid = NewType("Pid", int)

_PROC = Path("/proc")


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
    parent_pid: int
    session_id: int
    start_time_ticks: int


def _read_stat(pid: int) -> _Stat | None:
    """Reads /proc/PID/stat; None where there is no such process (proc(5) numbers its fields from 1)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(Pid(pid), fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def identify(pid: int) -> ProcessIdentity | None:
    """Names the process that has this pid now. None: there is none, or it is a zombie."""
    stat = _read_stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessIdentity(stat.pid, stat.start_time_ticks)


def identify_child(pid: int) -> ProcessIdentity:
    """Names a child of this process that nobody has waited for. One that has ended is still there, a zombie.

    Raises:
        ProcessLookupError: It is not such a child.
    """
    stat = _read_stat(pid)
    if stat is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return ProcessIdentity(stat.pid, stat.start_time_ticks)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether that very process still runs."""
    return identify(identity.pid) == identity


def process_tree(root: ProcessIdentity) -> list[ProcessIdentity]:
    """The process, its descendants and all others of its session, by start time.

    A workload's first process leads a session of its own, so that orphans are found too.
    """
    stats = {stat.pid: stat for stat in _all_stats()}
    leader = stats.get(root.pid)
    reused = leader is not None and leader.start_time_ticks != root.start_time_ticks
    members = set() if reused else {root.pid} & stats.keys()
    if not reused:
        members |= {pid for pid, stat in stats.items() if stat.session_id == root.pid}
    grown = True
    while grown:
        children = {pid for pid, stat in stats.items() if stat.parent_pid in members}
        grown = not children <= members
        members |= children
    found = [stats[pid] for pid in members if stats[pid].state not in "ZX"]
    found.sort(key=lambda stat: (stat.start_time_ticks, stat.pid))
    return [ProcessIdentity(stat.pid, stat.start_time_ticks) for stat in found]


def _all_stats() -> Iterator[_Stat]:
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            stat = _read_stat(int(entry.name))
            if stat is not None:
                yield stat


def why_blocked(identity: ProcessIdentity) -> str | None:
    """Why the process can't answer the driver, whose calls would then block for ever. None: it can.

    The driver talks to a thread inside the process, which must be able to run.
    """
    stat = _read_stat(identity.pid)
    if stat is None:
        return None
    return {"T": "stopped by a signal", "t": "stopped by a debugger"}.get(stat.state)


@contextmanager
def held(identity: ProcessIdentity) -> Iterator[int | None]:
    """Holds the process by a pidfd: while it is held, its pid can't come to mean another process.

    Yields:
        The pidfd, readable once the process has ended; None where it is gone already.
    """
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield pidfd if is_alive(identity) else None
    finally:
        os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    """Whether the process behind the pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def send_signal(identity: ProcessIdentity, signal_number: int) -> None:
    """Signals that very process; does nothing where it is gone."""
    with held(identity) as pidfd:
        if pidfd is None:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal_number)
        except ProcessLookupError:
            return


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
