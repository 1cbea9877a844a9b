"""Lines of the worker's log say which command and workload they are about."""

import io
import logging

import pytest
import trio
from leasehold_worker.log_context import ContextFilter, log_context
from leasehold_worker.log_format import LogFormatter


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(lines: io.StringIO) -> logging.Logger:
    handler = logging.StreamHandler(lines)
    handler.setFormatter(LogFormatter())
    handler.addFilter(ContextFilter())
    made = logging.Logger("worker")
    made.addHandler(handler)
    return made


async def test_tasks_and_threads_of_a_command_name_it_and_others_do_not(
    logger: logging.Logger, lines: io.StringIO
) -> None:
    async with trio.open_nursery() as nursery:
        with log_context(command="c-1", workload="w-1"):
            nursery.start_soon(trio.to_thread.run_sync, logger.info, "in a thread")
            logger.info("in the task")
        logger.info("outside")
    said = {line.rpartition("] ")[2] if "]" in line else line for line in lines.getvalue().splitlines()}
    assert {"in a thread", "in the task"} <= said
    inside = [
        line for line in lines.getvalue().splitlines() if "worker: [command=c-1 workload=w-1] in " in line
    ]
    assert len(inside) == 2
    assert "worker: outside" in lines.getvalue()


def test_an_inner_context_adds_to_the_outer_one_and_forges_no_line(
    logger: logging.Logger, lines: io.StringIO
) -> None:
    with log_context(epoch="3"), log_context(command="c\nINFO forged"):
        logger.info("said")
    assert "[epoch=3 command=c\\nINFO forged] said" in lines.getvalue()
