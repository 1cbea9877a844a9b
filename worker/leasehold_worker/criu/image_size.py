"""The size of a future image."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from leasehold_worker.host.processes import ProcessIdentity

OVERHEAD_BYTES: Final = 1 << 20
"""Bytes per process for its descriptors, mappings and threads."""

_FIELDS: Final = frozenset({"Anonymous", "Pss_Shmem", "Swap"})
"""Fields of smaps_rollup (proc_pid_smaps_rollup(5)) that count memory outside of files, which an image
contains."""


def image_bytes(processes: Iterable[ProcessIdentity]) -> int:
    """An upper bound of the size of an image of processes in their current state.

    Call it while members are CHECKPOINTED: their device memory is host memory then. Reading takes some
    milliseconds per GiB of a process.
    """
    return sum(_memory_bytes(process.pid) + OVERHEAD_BYTES for process in processes)


def _memory_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    pairs = (line.partition(":") for line in lines)
    return sum(int(value.split()[0]) * 1024 for name, _, value in pairs if name in _FIELDS)
