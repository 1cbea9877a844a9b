"""The terminal of ``leasehold top``: input that no byte can end.

The input thread of textual decodes UTF-8 strictly, and its parser raises ValueError or ZeroDivisionError for
some escape sequences, such as ``ESC [ 1114112 u``. Either ends the page with a traceback. A terminal sends
such bytes if its encoding differs, after a paste, and on a noisy line. textual has no public setting for
that, so its input loop is replaced here.
"""

import os
import selectors
import signal
from codecs import getincrementaldecoder
from typing import Final, final

from textual._xterm_parser import XTermParser  # textual has no public parser
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

POLL_S: Final = 0.1
"""Time between two checks whether the page has ended, as in textual."""

READ_BYTES: Final = 4096


@final
class Pastes:
    """Drops each Escape of a pasted text: textual would read the characters after it as keys.

    Most terminals drop them too, but not all.
    """

    BEGIN: Final = "\x1b[200~"
    END: Final = "\x1b[201~"

    def __init__(self) -> None:
        self._is_inside = False
        self._recent = ""
        """The last characters before a paste."""
        self._held = ""
        """Characters of a paste that may be the first ones of its end."""

    def take(self, character: str) -> str:
        """Takes a character of the input, and returns those that the page gets."""
        if not self._is_inside:
            self._recent = (self._recent + character)[-len(self.BEGIN) :]
            self._is_inside = self._recent == self.BEGIN
            return character
        held = self._held + character
        if held == self.END:
            self._is_inside, self._recent, self._held = False, "", ""
            return held
        self._held = next(end for end in (held, character, "") if self.END.startswith(end))
        return held.removesuffix(self._held).replace("\x1b", "")


@final
class TerminalDriver(LinuxDriver):
    """The driver of textual for Linux, whose input goes on after malformed bytes.

    A byte that is not UTF-8 becomes U+FFFD, which is no key of the page. A malformed escape sequence is
    dropped.
    """

    _parser: XTermParser

    def run_input_thread(self) -> None:
        """Reads the terminal until the page ends. The page ends too if the terminal is gone."""
        decoder = getincrementaldecoder("utf-8")("replace")
        self._parser = XTermParser()
        pastes = Pastes()
        with selectors.DefaultSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(POLL_S):
                    data = self._read()
                    if not data:
                        self._app.call_later(self._app.exit, return_code=128 + signal.SIGHUP)
                        return
                    # One by one: a sequence that fails does not take the beginning of a paste with it.
                    for character in decoder.decode(data):
                        for taken in pastes.take(character):
                            self._parse(taken)
                self._parse("")

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, READ_BYTES)
        except OSError:  # the other side of a pseudo-terminal is closed
            return b""

    def _parse(self, character: str) -> None:
        """Parses a character. Empty: a pause, which ends a sequence such as a single Escape."""
        events: list[Message] = []
        try:
            events += self._parser.feed(character) if character else self._parser.tick()
        except Exception:  # noqa: BLE001 - input decides which one
            self._parser = XTermParser()
        for event in events:
            self.process_message(event)
