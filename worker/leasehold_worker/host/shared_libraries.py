"""Shared libraries loaded by processes. Driver helpers import this and start often: no trio here."""

from pathlib import Path

import msgspec

from leasehold_worker.host.process_folders import facts_folder


class LoadedLibrary(msgspec.Struct, frozen=True):
    """A shared library as mapped by a process.

    Attributes:
        path: Its path, as the process sees it.
        file_id: Device and inode: equal if two processes have the same file.
    """

    path: str
    file_id: str


def loaded_library(pid: int, name: str) -> LoadedLibrary | None:
    """The shared library of a process whose file name has this prefix. None: it has none."""
    try:
        lines = (facts_folder(pid) / "maps").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return None
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(name):
            return LoadedLibrary(fields[5], f"{fields[3]}:{fields[4]}")
    return None
