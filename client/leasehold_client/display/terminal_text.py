"""Text of others that is safe on a terminal: names, reasons and arguments come from any user of any host."""

import os
import sys
import unicodedata
from typing import Final, TextIO

import click

_LINE_BREAKS: Final = "\n\t"

_UNSAFE: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Control characters, halves of characters, and separators of lines: a terminal may obey them."""

_DIRECTIONS: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that let text appear in another order than it has."""


def safe_text(text: str) -> str:
    """The text with every character escaped that a terminal may obey, except line breaks and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in _LINE_BREAKS else _safe(one) for one in text)


def safe_cell(text: str) -> str:
    """The same for a cell of a table, which has one line."""
    return "".join(map(_safe, text))


def _safe(character: str) -> str:
    if unicodedata.category(character) in _UNSAFE or character in _DIRECTIONS:
        return ascii(character)[1:-1]
    return character


def echo_error(text: str) -> None:
    """Prints lines to standard error. They are dropped where they can't be written: the exit code remains."""
    try:
        click.echo(safe_text(text), err=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Drops what a stream still buffers: it would fail once more, with a traceback, when Python exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
