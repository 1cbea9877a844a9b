"""Sizes as text for users."""

import re
from decimal import Decimal
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MOST_BYTES: Final = 2**63 - 1
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_FACTORS: Final = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}


def size_text(size_bytes: int) -> str:
    """A size in its largest whole unit, such as "1.5 GiB"."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size_bytes / 1024**power:.4g} {_UNITS[power]}"


def parse_size(text: str) -> int:
    """The bytes of a size such as "1.5 GiB", "500MB" or "4096"; parts of a byte are dropped.

    KiB to PiB are powers of 1024, kB to PB powers of 1000, in any case of letters. A bare "8G" is refused,
    since programs differ about its meaning.

    Raises:
        ValueError: The text is not a size, or exceeds 2**63 - 1 bytes; the message has the remedy.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"invalid size {text!r}: write bytes, or a number with a unit, like 1.5GiB or 500MB")
    size_bytes = int(Decimal(match[1]) * factor)
    if size_bytes > _MOST_BYTES:
        raise ValueError(f"size {text!r} is larger than any host: give 8388607TiB at most")
    return size_bytes
