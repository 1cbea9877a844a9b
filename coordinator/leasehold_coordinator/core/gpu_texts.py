"""Words for GPUs, cordons and sizes in messages."""

from collections.abc import Sequence
from typing import Final

from leasehold.v1.lease_pb2 import Cordon, GpuLease

LISTED_LIMIT: Final = 5
"""Workers that a refusal names: it travels in the trailers of a call, which hold 8 KiB."""

TEXT_LIMIT: Final = 60
"""Characters of somebody's words that a refusal repeats."""


def gpus(count: int) -> str:
    """A number of GPUs."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def cordon_text(cordon: Cordon) -> str:
    """Why and by whom, in brackets; empty where nobody said."""
    parts = [cordon.reason[:TEXT_LIMIT]] if cordon.reason else []
    parts += [f"by {cordon.cordoned_by[:TEXT_LIMIT]}"] if cordon.cordoned_by else []
    return f" ({', '.join(parts)})" if parts else ""


def foreign_text(lease: GpuLease) -> str:
    """The processes on a GPU that belong to no workload; the first few, where there are many."""
    texts = []
    for process in lease.foreign_processes:
        user = f" of {process.user[:TEXT_LIMIT]}" if process.user else ""
        command = f" ({process.command[:TEXT_LIMIT]})" if process.command else ""
        texts.append(f"pid {process.pid}{user}{command}")
    return listed(texts, ", ") or "a process that Leasehold doesn't know"


def listed(texts: Sequence[str], between: str = "; ") -> str:
    """The first few texts, and how many more there are."""
    more = len(texts) - LISTED_LIMIT
    return between.join([*texts[:LISTED_LIMIT], *([f"and {more} more"] if more > 0 else [])])


def size(count_bytes: int) -> str:
    """Bytes for people."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
