"""Sizes as people read them."""

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size_bytes: int) -> str:
    """A size in the largest unit that it has one of, such as "1.5 GiB"."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size_bytes / 1024**power:.4g} {_UNITS[power]}"
