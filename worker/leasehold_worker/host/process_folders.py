"""Folders of a process in /proc. Driver helpers import this and start often: no trio here.

A process lives as long as one of its threads. If its first thread has ended (pthread_exit in main), the
kernel shows the process as a zombie, and /proc/PID has no memory, no files and no root any more: those are in
/proc/PID/task/TID of the other threads (proc(5)).
"""

import os
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")

_ENDED: Final = "ZX"
_STATE, _THREADS = 0, 17
"""Places after the name in /proc/PID/stat, whose fields proc(5) numbers from 1."""


def stat_fields(text: str) -> list[str]:
    """The fields of a stat file from the third one, the state. The name before may contain spaces."""
    return text[text.rindex(")") + 2 :].split()


def has_ended(fields: list[str]) -> bool:
    """Whether a process has ended, by the fields of its stat: a zombie has one thread."""
    return fields[_STATE] in _ENDED and int(fields[_THREADS]) <= 1


def facts_folder(pid: int) -> Path:
    """The folder of a process, or that of a living thread if the first thread has ended."""
    folder = PROC / str(pid)
    try:
        fields = stat_fields((folder / "stat").read_text(encoding="utf-8", errors="replace"))
        if fields[_STATE] in _ENDED and not has_ended(fields):
            return next((path for path in map(Path, _threads(folder)) if _runs(path)), folder)
    except (OSError, ValueError):
        return folder
    return folder


def _threads(folder: Path) -> list[str]:
    with os.scandir(folder / "task") as entries:
        return [entry.path for entry in entries]


def _runs(thread: Path) -> bool:
    try:
        fields = stat_fields((thread / "stat").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return False
    return fields[_STATE] not in _ENDED
