"""Sizes as people write them: 8GiB, 500MB, 1024."""

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Final

import click

SIZE_LIMIT: Final = 2**63 - 1
"""More than there is of anything, and a number that everybody holds."""

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)

if TYPE_CHECKING:
    IntegerType = click.ParamType[int]
else:  # older versions of click know no parameters of types
    IntegerType = click.ParamType


def parse_size(text: str) -> int:
    """The bytes of a size, without a fraction of a byte.

    Args:
        text: A number of 0 or more, then nothing or B (bytes), KiB, MiB, GiB or TiB (powers of 1024), or KB,
            MB, GB or TB (powers of 1000), in either case of letters.

    Raises:
        ValueError: It is none, or too large. Its text is one sentence.
    """
    parts = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(parts[2].lower()) if parts else None
    if parts is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 8GiB, 500MB or 1024B")
    size = int(Decimal(parts[1]) * factor)
    if size > SIZE_LIMIT:
        raise ValueError(f"{text!r} is more than can be: {SIZE_LIMIT} bytes are the most")
    return size


class Size(IntegerType):
    """A size, as an option's value: bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads the size, or fails with the rule."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def size_text(count_bytes: int) -> str:
    """Bytes for people."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
