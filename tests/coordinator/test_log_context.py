"""Lines of the coordinator's log say which command and workload they are about."""

import asyncio
import io
import logging

import pytest
from leasehold_coordinator.log_context import ContextFilter, log_context
from leasehold_coordinator.log_format import LogFormatter


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(lines: io.StringIO) -> logging.Logger:
    handler = logging.StreamHandler(lines)
    handler.setFormatter(LogFormatter())
    handler.addFilter(ContextFilter())
    made = logging.Logger("coordinator")
    made.addHandler(handler)
    return made


def test_tasks_and_threads_of_a_command_name_it_and_others_do_not(
    logger: logging.Logger, lines: io.StringIO
) -> None:
    async def scenario() -> None:
        with log_context(command="c-1", workload="w-1"):
            thread = asyncio.create_task(asyncio.to_thread(logger.info, "in a thread"))
            logger.info("in the task")
        logger.info("outside")
        await thread

    asyncio.run(scenario())
    inside = [line for line in lines.getvalue().splitlines() if "[command=c-1 workload=w-1] in " in line]
    assert len(inside) == 2
    assert "coordinator: outside" in lines.getvalue()


def test_an_inner_context_adds_to_the_outer_one_and_forges_no_line(
    logger: logging.Logger, lines: io.StringIO
) -> None:
    with log_context(epoch="3"), log_context(command="c\nINFO forged"):
        logger.info("said")
    assert "[epoch=3 command=c\\nINFO forged] said" in lines.getvalue()
