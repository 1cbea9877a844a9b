"""Facts of /proc about living processes."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """The start time of a process in clock ticks after boot; None if there is none or it is a zombie.

    A process whose first thread has ended looks like a zombie and lives on with the others.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # from field 3 on: the name before it may hold spaces
    return None if fields[0] in "ZX" and int(fields[17]) <= 1 else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Is it stopped by a signal or a tracer?"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] in "Tt"


def has_thread(pid: int, tid: int) -> bool:
    """Does the process have this thread?"""
    return Path(f"/proc/{pid}/task/{tid}").exists()


def has_restore_thread(pid: int, tid: int) -> bool:
    """Is this thread of the process the one through which its driver answers?"""
    try:
        return Path(f"/proc/{pid}/task/{tid}/comm").read_text().rstrip("\n") == f"cuda{pid:011x}"
    except OSError:
        return False
