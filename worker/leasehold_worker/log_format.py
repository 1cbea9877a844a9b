"""The format of log lines, in which no workload, user or coordinator can forge lines or terminal codes."""

import logging
from typing import Final, Literal, TypeAlias, final

LogFormat: TypeAlias = Literal["text", "json"]

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(context)s%(message)s"


@final
class LogFormatter(logging.Formatter):
    """Escapes characters that are not printable: messages contain foreign names, arguments and errors."""

    def __init__(self) -> None:
        super().__init__(FORMAT, defaults={"context": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        """The message and its context, on one line."""
        record.message = printable(record.message)
        record.context = printable(getattr(record, "context", ""))
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """The entry. Only a traceback has further lines."""
        return "\n".join(map(printable, super().format(record).split("\n")))


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    """The formatter of a log format."""
    if log_format == "text":
        return LogFormatter()
    from leasehold_worker.log_json import json_formatter  # late: text needs nothing of structlog

    return json_formatter()


def printable(text: str) -> str:
    """The text with an escape for each character that is not printable."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
