"""Facts of /proc about live processes."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a signal or a tracer has stopped the process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] in "Tt"


def has_restore_thread(pid: int, tid: int) -> bool:
    """Whether this thread is the restore thread of the process, through which its driver answers."""
    try:
        with open(f"/proc/{pid}/task/{tid}/comm", "rb", buffering=0) as file:
            return file.read() == b"cuda%011x\n" % pid
    except OSError:
        return False
