"""The worker's log as JSON: one object per line, whatever a message holds."""

import io
import json
import logging

import pytest
from leasehold_worker.log_context import ContextFilter, log_context
from leasehold_worker.log_format import formatter_of


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(lines: io.StringIO) -> logging.Logger:
    handler = logging.StreamHandler(lines)
    handler.setFormatter(formatter_of("json"))
    handler.addFilter(ContextFilter())
    made = logging.Logger("worker.part")
    made.addHandler(handler)
    return made


def test_a_line_is_an_object_with_context_and_fields(logger: logging.Logger, lines: io.StringIO) -> None:
    with log_context(command="c-1", workload="w-1", session=""):
        logger.info("%s took %d s", "suspend", 3, extra={"verb": "suspend", "secret": "left out"})
    (line,) = lines.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "info",
        "logger": "worker.part",
        "message": "suspend took 3 s",
        "verb": "suspend",
        "command": "c-1",
        "workload": "w-1",
    }


def test_a_message_forges_no_line_and_no_field(logger: logging.Logger, lines: io.StringIO) -> None:
    with log_context(command='c-1", "level": "error'):
        logger.info('x\n{"level": "error"}\x1b[2J\u2028é\udc80')
    (line,) = lines.getvalue().splitlines()
    assert line.isprintable()
    assert json.loads(line)["level"] == "info"
    assert json.loads(line)["message"] == 'x\n{"level": "error"}\x1b[2J\u2028é\udc80'


def test_a_traceback_is_a_field(logger: logging.Logger, lines: io.StringIO) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed because of a defect")
    (line,) = lines.getvalue().splitlines()
    assert json.loads(line)["exception"].splitlines()[-1] == "ValueError: broken"
