"""The worker's log, with names that others choose."""

import logging
import sys

from leasehold_worker.log_format import LogFormatter


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord(
        "worker", logging.INFO, "file", 1, message, None, sys.exc_info() if sys.exc_info()[0] else None
    )


def test_a_message_is_one_printable_line() -> None:
    line = LogFormatter().format(record("workload \x1b[2J\x07 é\nINFO forged\u2028line"))
    assert line.endswith(r"INFO worker: workload \x1b[2J\x07 é\nINFO forged\u2028line")
    assert line.isprintable()


def test_a_traceback_keeps_its_lines_and_no_escapes() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        text = LogFormatter().format(record("failed"))
    assert len(text.splitlines()) > 3
    assert "\x1b" not in text
