"""Sizes in bytes, as text for people: 8GiB, 500MB, 1024."""

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Final

import click

SIZE_LIMIT: Final = 2**63 - 1
"""Largest size: the range of a signed 64-bit integer."""

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)},  # as Kubernetes writes them
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)

if TYPE_CHECKING:
    IntegerType = click.ParamType[int]
else:  # older versions of click have no generic ParamType
    IntegerType = click.ParamType


def parse_size(text: str) -> int:
    """Parses a size into whole bytes.

    Args:
        text: A number of 0 or more, then nothing or B (bytes), KiB, MiB, GiB or TiB (powers of 1024, also
            without B), or KB, MB, GB or TB (powers of 1000), in either case of letters.

    Raises:
        ValueError: The text is not a size, or the size is too large. The error's text is one sentence.
    """
    parts = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(parts[2].lower()) if parts else None
    if parts is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 8GiB, 500MB or 1024B")
    size = int(Decimal(parts[1]) * factor)
    if size > SIZE_LIMIT:
        raise ValueError(f"{text!r} is too large: the maximum is {SIZE_LIMIT} bytes")
    return size


class Size(IntegerType):
    """A click parameter type: a size in bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the size."""
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def size_text(count_bytes: int) -> str:
    """Formats a size with one decimal and a binary unit."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
