"""Files of /proc, read up to a limit and without waiting."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NewType

from leasehold_worker.host.process_folders import PROC, facts_folder, stat_fields
from leasehold_worker.host.process_folders import has_ended as fields_show_end
from leasehold_worker.host.process_memory import read_memory

Pid = NewType("Pid", int)


READ_BYTES: Final = 65_536
"""Bytes of one read of ``/proc``."""

READ_LIMIT: Final = 8 * 2**20
"""Bytes of a file that are read. Linux permits 6 MiB for arguments and environment together (execve(2)).

A process can move its environment and its arguments to any part of its memory (PR_SET_MM in prctl(2)), so
that its files in /proc have the size of an address space.
"""

_OF_MEMORY: Final = frozenset({"environ", "cmdline"})
"""Files that are empty for a process whose first thread has ended."""


_PF_KTHREAD: Final = 0x200000
"""Flag of a thread of the kernel (linux/sched.h)."""

_FLAGS, _CODE_START, _ENVIRONMENT_START, _ENVIRONMENT_END = 6, 23, 47, 48
"""Places after the name in /proc/PID/stat. The last three are addresses."""

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of this host's own shortage, which tell nothing about the process."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat (proc(5))."""

    pid: Pid
    state: str
    over: bool
    """All its threads have ended: it is a zombie, or about to be reaped."""
    parent_pid: int
    group_id: int
    session_id: int
    flags: int
    start_time_ticks: int


def read_stat(pid: int) -> ProcessStat | None:
    """Reads /proc/PID/stat; None if it is not visible (proc(5) numbers its fields from 1)."""
    return _parse_stat(pid, read_process_file(pid, "stat"))


def read_stat_of(folder: Path) -> ProcessStat | None:
    """The stat of a thread; None where the thread has ended."""
    try:
        return _parse_stat(int(folder.name), (folder / "stat").read_bytes())
    except OSError:
        return None


def _parse_stat(pid: int, content: bytes) -> ProcessStat | None:
    text = content.decode(errors="replace")
    if not text:
        return None
    try:
        fields = stat_fields(text)
        parent, group, session, flags, start = (int(fields[place]) for place in (1, 2, 3, 6, 19))
        return ProcessStat(Pid(pid), fields[0], fields_show_end(fields), parent, group, session, flags, start)
    except (ValueError, IndexError):
        return None


def read_status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; none if it is not visible."""
    text = read_process_file(pid, "status").decode(errors="replace")
    # Split at newlines only: a program's name may contain other characters that str.splitlines splits at.
    return dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)


def may_have_environment(pid: int) -> bool:
    """Whether a process whose environment was just read as empty has one nevertheless.

    During execve(2), the kernel gives the process a new address space, copies the environment to it, and then
    sets the addresses of the environment and at last of the program (load_elf_binary in fs/binfmt_elf.c of
    Linux). An exiting process has no address space. If the worker may not read a process, the kernel reports
    the program's address as 1, and the environment is unknown.
    """
    try:
        fields = stat_fields(_read_visible(f"{facts_folder(pid)}/stat").decode(errors="replace"))
        flags, code, start, end = (
            int(fields[place]) for place in (_FLAGS, _CODE_START, _ENVIRONMENT_START, _ENVIRONMENT_END)
        )
    except (ValueError, IndexError):
        return False
    return not flags & _PF_KTHREAD and (code == 0 or start != end)


def environment_in_memory(pid: int) -> bytes:
    """The environment of another user's process, for a worker that may trace it. Empty: it can't be read."""
    folder = facts_folder(pid)
    try:
        fields = stat_fields(_read_visible(f"{folder}/stat").decode(errors="replace"))
        start, end = int(fields[_ENVIRONMENT_START]), int(fields[_ENVIRONMENT_END])
        length = min(end - start, READ_LIMIT)
        return read_memory(int(folder.name), start, length) if length > 0 else b""
    except (OSError, ValueError, IndexError):
        return b""


def number(text: str, base: int = 10) -> int | None:
    """A number of /proc. None: there is none."""
    try:
        return int(text, base)
    except ValueError:
        return None


def read_process_file(pid: int, name: str) -> bytes:
    """A file of a process. Empty if it is missing or not readable (hidepid, ptrace_scope).

    Raises:
        OSError: This host is short of descriptors or memory.
    """
    # A scan reads every process of the host: a Path and a file object take as long as the kernel does.
    return _read_visible(f"{facts_folder(pid) if name in _OF_MEMORY else f'{PROC}/{pid}'}/{name}")


def _read_visible(path: str) -> bytes:
    try:
        return _read_file(path)
    except OSError as error:
        if error.errno in _SHORT:
            raise
        return b""


def _read_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    content = bytearray()
    try:
        while len(content) < READ_LIMIT and (chunk := os.read(descriptor, READ_BYTES)):
            content += chunk
        return bytes(content)
    finally:
        os.close(descriptor)
