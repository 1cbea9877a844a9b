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
class WorkerQueries(Generic[Answer]):
    """The questions of one kind to one peer.

    Args:
        places: Questions that the peer may have at once. Others wait here, so that those nobody waits for any
            more are never sent.
    """

    __slots__ = ("_count", "_ended", "_places", "_waiting")

    def __init__(self, places: int) -> None:
        self._count = places
        self._places: asyncio.Semaphore | None = None
        """Made with the first question, since most peers are never asked."""
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._ended = False

    async def ask(self, send: Callable[[str], None], timeout_s: float) -> Answer:
        """Asks, and waits for the answer. Whoever is cancelled meanwhile is no longer answered.

        A question that was sent keeps its place until its answer comes or its time is over, also where the
        caller is cancelled: the peer is at work on it.

        Args:
            send: Sends the question with the id that it is given.
            timeout_s: How long the answer may take, the wait for a place included.

        Raises:
            UnansweredError: There is none.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if self._places is None:
            self._places = asyncio.Semaphore(self._count)
        places = self._places
        try:
            async with asyncio.timeout_at(deadline):
                await places.acquire()
        except TimeoutError:
            raise UnansweredError(ended=self._ended) from None
        if self._ended:
            places.release()
            raise UnansweredError(ended=True)
        question_id = uuid.uuid4().hex
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting[question_id] = answer
        over = loop.call_at(deadline, answer.cancel)

        def leave(_: "asyncio.Future[Answer]") -> None:
            over.cancel()
            self._waiting.pop(question_id, None)
            places.release()

        answer.add_done_callback(leave)
        send(question_id)
        await asyncio.wait({answer})
        if answer.cancelled():
            raise UnansweredError(ended=self._ended)
        return answer.result()

    def answer(self, question_id: str, answer: Answer) -> None:
        """Hands an answer to whoever asked; one that came too late is dropped."""
        waiting = self._waiting.get(question_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end(self) -> None:
        """The peer is gone: whoever waits is told so, and so is who asks later."""
        self._ended = True
        for waiting in list(self._waiting.values()):
            waiting.cancel()
