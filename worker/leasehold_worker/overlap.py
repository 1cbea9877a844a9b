"""Two independent functions that run concurrently."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from leasehold_worker.errors import OperationError

First = TypeVar("First")
Second = TypeVar("Second")
Answer = TypeVar("Answer")


async def both(
    first: Callable[[], Awaitable[First]], second: Callable[[], Awaitable[Second]]
) -> tuple[First, Second]:
    """Runs both functions concurrently, and returns both results.

    An error does not cancel the other function, so the reported error does not depend on timing.

    Raises:
        OperationError: The error of the first function, or else of the second. Both have ended.
    """
    firsts: list[First] = []
    seconds: list[Second] = []
    errors: dict[int, OperationError] = {}

    async def ask(number: int, question: Callable[[], Awaitable[Answer]], answers: list[Answer]) -> None:
        try:
            answers.append(await question())
        except OperationError as error:
            errors[number] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 1, second, seconds)
        await ask(0, first, firsts)
    if errors:
        raise errors[min(errors)]
    return firsts[0], seconds[0]
