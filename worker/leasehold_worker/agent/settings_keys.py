"""Unknown keys of a settings file, NUL characters, and values of another type."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from leasehold_worker.errors import StartError

_TYPE: Final = re.compile(r"`([^`]*)`")
_TYPES: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a table",
    "str": "text",
}
"""Types of msgspec as people say them."""


def require_no_nul(path: Path, document: Mapping[str, object]) -> None:
    """Refuses keys whose text has a NUL character, which no path, address or name has.

    Args:
        path: The file, for the message.
        document: The keys and values in the file.

    Raises:
        StartError: A text has one.
    """
    for key, value in document.items():
        if isinstance(value, str) and "\0" in value:
            raise StartError(
                f"the configuration {path} has an invalid value of {key}: it has a NUL character: "
                "leave it out"
            )


def require_known(path: Path, keys: Iterable[str], known: Iterable[str]) -> None:
    """Refuses a key that is not known, and suggests the closest one.

    Args:
        path: The file, for the message.
        keys: The keys in the file.
        known: The known keys.

    Raises:
        StartError: A key is unknown.
    """
    known = [*known]
    for key in keys:
        if key not in known:
            from difflib import get_close_matches  # late: most keys are right

            close = get_close_matches(key[:100].lower(), known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it"
            raise StartError(
                f"the configuration {path} has the unknown key {key[:100]!r}: {remedy} "
                "(docs/cli.md#settings lists the keys)"
            )


def explain(fault: msgspec.ValidationError) -> str:
    """A value of another type: its key, and the types as people say them."""
    what, _, place = str(fault).partition(" - at `$.")
    what = what.replace("Invalid enum value", "not one of its values:")
    said = _TYPE.sub(lambda found: " or ".join(_TYPES.get(one, one) for one in found[1].split(" | ")), what)
    return f"{place.removesuffix('`')}: {said[0].lower()}{said[1:]} (see docs/cli.md#settings)"
