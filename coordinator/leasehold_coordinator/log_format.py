"""The format of log lines. Escapes keep peers from forging lines and from controlling a terminal."""

import logging
from types import TracebackType
from typing import Final, Literal, TypeAlias, final

LogFormat: TypeAlias = Literal["text", "json"]

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(context)s%(message)s"
LINE_LIMIT_CHARACTERS: Final = 4_096
"""Characters of a message in the log. An id or a reason that a peer sends has up to 256 KiB."""

_ExceptionInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


@final
class LogFormatter(logging.Formatter):
    """Escapes unprintable characters: messages hold text of workers, clients and users."""

    def __init__(self) -> None:
        super().__init__(FORMAT, defaults={"context": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        """The line. Line breaks in its message are escaped."""
        if len(record.message) > LINE_LIMIT_CHARACTERS:
            record.message = f"{record.message[:LINE_LIMIT_CHARACTERS]} …"
        record.message = printable(record.message)
        record.context = printable(getattr(record, "context", ""))
        return super().formatMessage(record)

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802 - likewise
        """The traceback. Its line breaks are kept."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    """The formatter of a log format."""
    if log_format == "text":
        return LogFormatter()
    from leasehold_coordinator.log_json import json_formatter  # late: text needs nothing of structlog

    return json_formatter()


def printable(text: str) -> str:
    """A text with its unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
