"""Texts about GPUs, cordons and sizes for messages."""

from collections.abc import Sequence
from typing import Final

from leasehold.v1.lease_pb2 import Cordon, GpuLease

LISTED_LIMIT: Final = 5
"""Most workers that a refusal names. The trailers of a call carry the refusal, and hold 8 KiB."""

TEXT_LIMIT: Final = 60
"""Most characters of a quoted text in a refusal."""


def gpus(count: int) -> str:
    """A number of GPUs."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def cordon_text(cordon: Cordon) -> str:
    """The reason and the author of a cordon, in parentheses. Empty if the cordon has neither."""
    parts = [cordon.reason[:TEXT_LIMIT]] if cordon.reason else []
    parts += [f"by {cordon.cordoned_by[:TEXT_LIMIT]}"] if cordon.cordoned_by else []
    return f" ({', '.join(parts)})" if parts else ""


def foreign_text(lease: GpuLease, *, with_commands: bool = True) -> str:
    """The foreign processes on a GPU: the first few, and the number of the others.

    Args:
        lease: The lease of the GPU.
        with_commands: Whether the text has command lines, which other users must not see.
    """
    texts = []
    for process in lease.foreign_processes:
        user = f" of {process.user[:TEXT_LIMIT]}" if process.user else ""
        command = f" ({process.command[:TEXT_LIMIT]})" if process.command and with_commands else ""
        texts.append(f"pid {process.pid}{user}{command}")
    return listed(texts, ", ") or "a process that Leasehold doesn't know"


def listed(texts: Sequence[str], between: str = "; ") -> str:
    """The first few texts, and the number of the others."""
    more = len(texts) - LISTED_LIMIT
    return between.join([*texts[:LISTED_LIMIT], *([f"and {more} more"] if more > 0 else [])])


def size(count_bytes: int) -> str:
    """A number of bytes with a binary unit, such as ``1.5 GiB``."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
