"""Pasted text has no power over the page, whatever is in it."""

from leasehold_client.top.terminal_driver import Pastes
from textual._xterm_parser import XTermParser
from textual.events import Key, Paste
from textual.message import Message


def events_of(text: str) -> list[Message]:
    """What textual makes of an input."""
    pastes, parser = Pastes(), XTermParser()
    taken = "".join(map(pastes.take, text))
    return [event for character in taken for event in parser.feed(character)]


def test_an_escape_within_a_paste_makes_no_keys() -> None:
    for pasted in ("a\x1b[:usy", "\x1b[20\x1b[201usy", "\x1b\x1b[2sy", "\x1b[200~sy"):
        paste, key = events_of(f"{Pastes.BEGIN}{pasted}{Pastes.END}q")
        assert isinstance(paste, Paste)
        assert paste.text == pasted.replace("\x1b", "")
        assert isinstance(key, Key)
        assert key.key == "q"


def test_what_is_typed_stays_as_it_is() -> None:
    typed = "s\x1b[A\x1b\x1b[200q\x1b[201~y"
    assert "".join(map(Pastes().take, typed)) == typed
