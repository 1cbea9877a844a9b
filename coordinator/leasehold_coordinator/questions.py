"""Questions to a peer that wait for their answers: each has an id, a deadline, and one answer at most."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar, final

Answer = TypeVar("Answer")


class UnansweredError(Exception):
    """No answer came.

    Attributes:
        ended: The peer is gone. False: it had its time, and said nothing.
    """

    def __init__(self, *, ended: bool) -> None:
        super().__init__("the peer is gone" if ended else "the peer did not answer in time")
        self.ended = ended


@final
class Questions(Generic[Answer]):
    """The questions of one kind to one peer."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._ended = False

    async def ask(self, send: Callable[[str], None], timeout_s: float) -> Answer:
        """Asks, and waits for the answer. Whoever is cancelled meanwhile is no longer answered.

        Args:
            send: Sends the question with the id that it is given.
            timeout_s: How long the answer may take.

        Raises:
            UnansweredError: There is none.
        """
        if self._ended:
            raise UnansweredError(ended=True)
        question_id = uuid.uuid4().hex
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[question_id] = answer
        try:
            send(question_id)
            done, _ = await asyncio.wait({answer}, timeout=timeout_s)
            if not done or answer.cancelled():
                raise UnansweredError(ended=answer.cancelled())
            return answer.result()
        finally:
            del self._waiting[question_id]

    def answer(self, question_id: str, answer: Answer) -> None:
        """Hands an answer to whoever asked; one that came too late is dropped."""
        waiting = self._waiting.get(question_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end(self) -> None:
        """The peer is gone: whoever waits is told so, and so is who asks later."""
        self._ended = True
        for waiting in self._waiting.values():
            waiting.cancel()
