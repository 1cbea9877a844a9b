"""Questions to a peer. Each has an id, a deadline, and at most one answer."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar, final

from leasehold_coordinator.fleet.fair_places import FairPlaces

Answer = TypeVar("Answer")


class UnansweredError(Exception):
    """No answer came.

    Attributes:
        ended: The peer has disconnected. False: the peer did not answer in time.
    """

    def __init__(self, *, ended: bool) -> None:
        super().__init__("the peer has disconnected" if ended else "the peer did not answer in time")
        self.ended = ended


@final
class WorkerQueries(Generic[Answer]):
    """The questions of one kind to one peer.

    Args:
        places: Most concurrent questions to the peer. Further questions wait here, and are never sent if
            their callers are cancelled meanwhile.
        share: Most places of one caller.
    """

    __slots__ = ("_count", "_ended", "_places", "_share", "_waiting")

    def __init__(self, places: int, share: int) -> None:
        self._count, self._share = places, share
        self._places: FairPlaces | None = None
        """Created by the first question, since most peers are never asked."""
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._ended = False

    async def ask(self, send: Callable[[str], None], timeout_s: float, caller: str) -> Answer:
        """Asks, and waits for the answer. A cancelled caller gets no answer.

        A sent question keeps its place until its answer or its deadline, even if the caller is cancelled,
        since the peer still works on it.

        Args:
            send: Sends the question with the given id.
            timeout_s: How long the answer may take, including the wait for a place.
            caller: Whose question it is.

        Raises:
            UnansweredError: No answer came.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if self._places is None:
            self._places = FairPlaces(self._count, self._share)
        try:
            async with asyncio.timeout_at(deadline):
                give_back = await self._places.take(caller)
        except TimeoutError:
            raise UnansweredError(ended=self._ended) from None
        if self._ended:
            give_back()
            raise UnansweredError(ended=True)
        question_id = uuid.uuid4().hex
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting[question_id] = answer
        over = loop.call_at(deadline, answer.cancel)

        def leave(_: "asyncio.Future[Answer]") -> None:
            over.cancel()
            self._waiting.pop(question_id, None)
            give_back()

        answer.add_done_callback(leave)
        send(question_id)
        await asyncio.wait({answer})
        if answer.cancelled():
            raise UnansweredError(ended=self._ended)
        return answer.result()

    def answer(self, question_id: str, answer: Answer) -> None:
        """Delivers an answer to its caller. A late answer is dropped."""
        waiting = self._waiting.get(question_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end(self) -> None:
        """Fails all waiting and later questions, since the peer has disconnected."""
        self._ended = True
        for waiting in list(self._waiting.values()):
            waiting.cancel()
