"""Two independent questions, asked at the same time."""

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
    """Asks both at once, and returns both answers.

    Neither question ends the other, so that the result does not depend on their speed.

    Raises:
        OperationError: The error of the first question, or else of the second. Both have ended.
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
