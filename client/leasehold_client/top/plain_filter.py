"""Filters of the list: an AIP-160 expression, which the coordinator evaluates, or plain words. Pure."""

import re
from collections.abc import Iterable
from typing import Final

_RESTRICTION: Final = re.compile(r'[A-Za-z_][\w."/-]*\s*(?:!=|<=|>=|=|<|>|:)')
"""A field and a comparator: what each restriction of docs/api.md begins with."""

FILTER_LIMIT: Final = 2048
"""Longest filter in characters, as of docs/api.md."""


def is_expression(text: str) -> bool:
    """Whether a filter is an expression of AIP-160, and not plain words."""
    return _RESTRICTION.search(text) is not None


def contains_words(words: Iterable[str], texts: Iterable[str]) -> bool:
    """Whether each word is a part of some text.

    Args:
        words: The words, casefolded.
        texts: The texts, in any case.
    """
    whole = "\n".join(texts).casefold()
    return all(word in whole for word in words)
