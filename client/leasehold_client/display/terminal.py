"""The terminal of standard output: its width, its colours, and the widths of texts on it."""

import os
import shutil
import sys
import unicodedata
from typing import Final

_WIDE: Final = ("W", "F")
"""Classes of East Asian width (UAX 11) with two columns on a terminal."""

_TONES: Final = {
    "green": "CONNECTED RUNNING SUCCEEDED free ok",
    "red": "EXPIRED FAILED LOST NOT REFUSED REJECTED UNKNOWN WEDGED unhealthy",
    "yellow": "CANCELLED STALE UNCONFIRMED cordoned foreign",
    "cyan": "ACCEPTED DISPATCHED PENDING REMAPPING RESTORING RUNNING(not STOPPING SUSPENDING reserved",
    "blue": "CHECKPOINTED SLEEPING STOPPED SUSPENDED",
}
_CODES: Final = {"green": 32, "red": 31, "yellow": 33, "cyan": 36, "blue": 34}
_TONE_OF: Final = {word: _CODES[tone] for tone, words in _TONES.items() for word in words.split()}
"""ANSI code by the first word of a state. Other states have the terminal's own colour."""


def columns() -> int | None:
    """Columns of the terminal. None: standard output is no terminal, so nothing is shortened."""
    return shutil.get_terminal_size().columns if _is_terminal() else None


def has_colour() -> bool:
    """Whether standard output is a terminal with colours, and NO_COLOR is not set (no-color.org)."""
    return _is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def coloured(text: str, state: str) -> str:
    """A text in the colour of a state. The state itself must be in the text, since colour alone says nothing.

    Args:
        text: An escaped text.
        state: The state, such as ``EXITED(1)`` or ``CONNECTED,cordoned``.
    """
    if state.startswith("EXITED(") and state != "EXITED(0)":
        code: int | None = _CODES["red"]
    elif "cordoned" in state:
        code = _CODES["yellow"]
    else:
        code = _TONE_OF.get(state.split(" ")[0]) or _TONE_OF.get(state.split("(")[0].split(",")[0])
    return text if code is None else f"\x1b[{code}m{text}\x1b[0m"


def text_width(text: str) -> int:
    """Columns that an escaped text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in _WIDE else 1


def shortened(text: str, width: int) -> str:
    """The beginning of a text with an ellipsis, if the text is wider than ``width``."""
    if text_width(text) <= width:
        return text
    kept, used = [], text_width(ellipsis_sign())
    for character in text:
        used += _character_width(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept).rstrip() + ellipsis_sign()


def ellipsis_sign() -> str:
    """The mark of a shortened text, in the encoding of standard output."""
    # Textual's output in place of the standard one has no encoding: it writes UTF-8.
    encoding = getattr(sys.stdout, "encoding", "utf-8")
    try:
        "…".encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return "~"
    return "…"


def _is_terminal() -> bool:
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # it was closed
        return False
