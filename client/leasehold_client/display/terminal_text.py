"""Untrusted text on a terminal: names, reasons and arguments may come from any user of any host."""

import os
import sys
import unicodedata
from typing import Final, TextIO

import click

_LINE_BREAKS: Final = "\n\t"

_UNSAFE: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Control characters, surrogates and line separators, which a terminal may interpret."""

_DIRECTIONS: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional marks, which change the order of displayed text."""


def safe_text(text: str) -> str:
    """Escapes every character that a terminal may interpret, except line breaks and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in _LINE_BREAKS else _safe(one) for one in text)


def safe_cell(text: str) -> str:
    """Escapes line breaks and tabs too, for a cell of a table."""
    return "".join(map(_safe, text))


def _safe(character: str) -> str:
    if unicodedata.category(character) in _UNSAFE or character in _DIRECTIONS:
        return ascii(character)[1:-1]
    return character


def one_line(text: str) -> str:
    """Joins the lines of a text with single spaces."""
    return " ".join(text.split())


def echo_error(*lines: str) -> None:
    """Prints lines to standard error. A line break within a line is escaped.

    A failed write is ignored, since the exit code still counts.
    """
    try:
        click.echo("\n".join(map(safe_cell, lines)), err=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Drops the buffer of a stream. Otherwise Python fails again at its exit, with a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
