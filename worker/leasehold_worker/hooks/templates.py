"""Texts of hooks with names in braces, such as ``{workload}``. Pure."""

import re
from collections.abc import Callable, Mapping
from typing import Final

NAMES: Final = frozenset({"workload", "workload_id", "phase", "policy", "members"})
"""The names that braces may contain."""

_PIECE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def check(text: str) -> None:
    """Refuses an invalid template.

    Raises:
        ValueError: The text has an unknown name, or a single brace.
    """
    expand(text, dict.fromkeys(NAMES, ""))


def expand(text: str, values: Mapping[str, str], quote: Callable[[str], str] = str) -> str:
    """Replaces names in braces by their values, and doubled braces by single ones.

    Args:
        text: The template.
        values: A value for each of :data:`NAMES`.
        quote: Converts a value before it is inserted.

    Raises:
        ValueError: The text is not a template.
    """

    def replace(found: re.Match[str]) -> str:
        piece = found.group(0)
        if piece in ("{{", "}}"):
            return piece[0]
        name = found.group(1)
        if name is None:
            raise ValueError(f"a single {piece} stands in it: write {piece * 2} for a brace")
        if name not in values:
            known = ", ".join(f"{{{known}}}" for known in sorted(NAMES))
            raise ValueError(f"{{{name}}} is not known: write one of {known}, and {{{{ and }}}} for braces")
        return quote(values[name])

    return _PIECE.sub(replace, text)
