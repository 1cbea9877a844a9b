"""Suggestions for mistyped words. Pure."""

from collections.abc import Iterable
from typing import Final

CUTOFF: Final = 0.75
"""Smallest likeness of a suggestion. A word of four letters with two exchanged, such as ``stpo``, has it."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped word most likely means. None: no known word is close."""
    from difflib import get_close_matches  # late: most words are right

    word, words = word.lower(), [*known]
    # A short word with two letters exchanged is less like the right one than CUTOFF.
    exchanges = {word[:n] + word[n + 1 : n + 2] + word[n] + word[n + 2 :] for n in range(len(word))}
    found = [one for one in words if one in exchanges] or get_close_matches(word, words, 1, CUTOFF)
    return found[0] if found else None


def close_to(word: str, known: Iterable[str]) -> str:
    """A question with the closest known word, for the end of a clause. Empty: no known word is close."""
    found = closest(word, known)
    return f" (did you mean {found!r}?)" if found else ""
