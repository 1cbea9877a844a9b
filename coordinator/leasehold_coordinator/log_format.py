"""Lines of the log, which peers can neither forge nor fill with orders to a terminal."""

import logging
from types import TracebackType
from typing import Final, TypeAlias, final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(context)s%(message)s"
LINE_LIMIT_CHARACTERS: Final = 4_096
"""What a message in the log may have. An id or a reason of a peer has up to 256 KiB."""

_ExceptionInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


@final
class LogFormatter(logging.Formatter):
    """Escapes what is not printable: messages hold names and reasons of any worker, client and user."""

    def __init__(self) -> None:
        super().__init__(FORMAT, defaults={"context": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        """The line, with line breaks in its message escaped too."""
        if len(record.message) > LINE_LIMIT_CHARACTERS:
            record.message = f"{record.message[:LINE_LIMIT_CHARACTERS]} …"
        record.message = _printable(record.message)
        record.context = _printable(getattr(record, "context", ""))
        return super().formatMessage(record)

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802 - likewise
        """The traceback, which has lines of its own."""
        return "\n".join(map(_printable, super().formatException(ei).split("\n")))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
