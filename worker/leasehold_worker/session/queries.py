"""Answers to the questions of a coordinator. Each question ends in its answer, and has no other effect."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import Error
from leasehold.worker.v1.session_pb2 import (
    CheckpointAnswer,
    CheckpointQuery,
    ConnectRequest,
    ConnectResponse,
    OutputChunk,
    PlanAnswer,
    PlanQuery,
    ReadOutput,
)

from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.errors import OperationError, defect
from leasehold_worker.session.checkpoint_query import answer_checkpoints
from leasehold_worker.session.output_query import read_output
from leasehold_worker.session.plan_query import PlanQueries
from leasehold_worker.workloads.registry import Workloads

logger = logging.getLogger(__name__)

PLANS_AT_ONCE: Final = 4
"""As many as a coordinator asks for at once. So a plan that a hung target delays leaves places to others."""

PLAN_TIMEOUT_S: Final = 25.0
"""Time for a plan, from the arrival of its question. The coordinator gives up 30 s after it asked.

A driver call that hangs delays the answer until the call's own deadline. Its caller gets an error of the
coordinator before that.
"""

PLANS_LIMIT: Final = 64
"""Questions for plans that may wait for their answers. So they leave places to the other questions."""

QUESTIONS_LIMIT: Final = 256
"""Questions of all kinds that may wait for their answers, of 64 KiB at most each. Others are refused."""

LISTS_AT_ONCE: Final = 1

LISTS_LIMIT: Final = 16
"""Questions for checkpoints that may wait. Each ends also on a volume that does not answer."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A kind of question: its answer, and its refusal."""

    answer: Callable[[], Awaitable[ConnectRequest]]
    refuse: Callable[[Error], ConnectRequest]


@final
class Queries:
    """Answers questions.

    Args:
        workloads: The workloads, whose output is read.
        planning: Makes plans.
        disk: Lists checkpoints.
        worker_id: Id that checkpoints carry.
    """

    def __init__(
        self, workloads: Workloads, plan_queries: PlanQueries, disk: CheckpointDirectory, worker_id: str
    ) -> None:
        self._workloads = workloads
        self._plan_queries = plan_queries
        self._disk = disk
        self._worker_id = worker_id
        self._plans = trio.CapacityLimiter(PLANS_AT_ONCE)
        self._lists = trio.CapacityLimiter(LISTS_AT_ONCE)
        self._waiting: Counter[str] = Counter()
        """Number of unanswered questions by kind, which is the name of the frame."""

    @contextmanager
    def place(self, frame: ConnectResponse) -> Iterator[None]:
        """A place for a question until the end of the context.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES: too many questions wait.
        """
        kind = frame.WhichOneof("frame") or ""
        if self._waiting.total() >= QUESTIONS_LIMIT:
            raise _full(QUESTIONS_LIMIT, "questions")
        if kind == "plan_query" and self._waiting[kind] >= PLANS_LIMIT:
            raise _full(PLANS_LIMIT, "questions for plans")
        if kind == "checkpoint_query" and self._waiting[kind] >= LISTS_LIMIT:
            raise _full(LISTS_LIMIT, "questions for checkpoints")
        self._waiting[kind] += 1
        try:
            yield
        finally:
            self._waiting[kind] -= 1

    async def answer(self, frame: ConnectResponse) -> ConnectRequest | None:
        """The answer to a frame, or its refusal after any error. None: the frame is not a question."""
        question = self._question(frame)
        if question is None:
            return None
        try:
            return await question.answer()
        except OperationError as error:
            return question.refuse(error.to_proto())
        except Exception:
            logger.exception("a %s failed because of a defect", frame.WhichOneof("frame"))
            return question.refuse(defect().to_proto())

    def refuse(self, frame: ConnectResponse, error: OperationError) -> ConnectRequest | None:
        """The refusal of a frame. None: the frame is not a question."""
        question = self._question(frame)
        return question.refuse(error.to_proto()) if question else None

    def _question(self, frame: ConnectResponse) -> _Question | None:
        match frame.WhichOneof("frame"):
            case "read_output":
                return self._reading(frame.read_output)
            case "plan_query":
                return self._plan(frame.plan_query)
            case "checkpoint_query":
                return self._list(frame.checkpoint_query)
            case _:
                return None

    def _reading(self, request: ReadOutput) -> _Question:
        async def answer() -> ConnectRequest:
            return ConnectRequest(output_chunk=await read_output(self._workloads, request))

        return _Question(
            answer,
            lambda error: ConnectRequest(output_chunk=OutputChunk(read_id=request.read_id, error=error)),
        )

    def _plan(self, query: PlanQuery) -> _Question:
        async def answer() -> ConnectRequest:
            has_begun = False
            with trio.move_on_after(PLAN_TIMEOUT_S):
                async with self._plans:
                    has_begun = True
                    return ConnectRequest(plan_answer=await self._plan_queries.answer(query))
            late = _late(has_begun=has_begun)
            logger.warning("plan for workload %s: %s", query.workload_id or "-", late.message)
            raise late

        return _Question(
            answer, lambda error: ConnectRequest(plan_answer=PlanAnswer(plan_id=query.plan_id, error=error))
        )

    def _list(self, query: CheckpointQuery) -> _Question:
        async def answer() -> ConnectRequest:
            async with self._lists:
                found = await answer_checkpoints(self._disk, query, self._worker_id)
            return ConnectRequest(checkpoint_answer=found)

        return _Question(
            answer,
            lambda error: ConnectRequest(
                checkpoint_answer=CheckpointAnswer(query_id=query.query_id, error=error)
            ),
        )


def _full(limit: int, what: str) -> OperationError:
    """The refusal of a question beyond a limit."""
    return OperationError(
        errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
        f"{limit} {what} wait for this worker's answers, which is its limit: ask again later",
    )


def _late(*, has_begun: bool) -> OperationError:
    """The refusal of a plan that was not made in time.

    Args:
        has_begun: Whether its turn came.
    """
    why = "the plan is not complete" if has_begun else f"{PLANS_AT_ONCE} earlier plans are not complete"
    return OperationError(
        errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
        f"{why} after {PLAN_TIMEOUT_S:g} s, probably because the driver or a volume hangs: ask again later, "
        "or look at the host",
    )
