"""The live streams: what goes down each, and its end. The asyncio side of a session."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, final

from leasehold.v1 import errors_pb2
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    CheckpointAnswer,
    CheckpointQuery,
    ConnectResponse,
    Drain,
    Goodbye,
    GoodbyeReason,
    Hello,
    OutputChunk,
    PlanAnswer,
    PlanQuery,
    ReadOutput,
)

from leasehold_coordinator.core.known_worker import KnownWorker, SessionId
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.worker_queries import UnansweredError, WorkerQueries
from leasehold_coordinator.timestamps import duration

logger = logging.getLogger(__name__)

READ_PLACES: Final = 4
FOLLOW_PLACES: Final = 12
"""Reads of output that a worker has at once: of those who read what there is, and of those who follow."""

PLAN_PLACES: Final = 4
LIST_PLACES: Final = 2
"""Questions for plans and for checkpoints that a worker has at once."""

FRAME_LIMIT: Final = 256
"""Frames that may wait for a worker. More means that it doesn't read: its session ends."""

Write: TypeAlias = Callable[[ConnectResponse], Awaitable[bool]]
"""Sends a frame. False: the worker is gone."""


@final
class Session:
    """One worker's stream.

    Most of thousands of streams are idle. So the task that writes exists only while a frame waits.
    """

    def __init__(self, hello: Hello) -> None:
        self.session_id = SessionId(f"s-{uuid.uuid4().hex[:12]}")
        self.hello = hello
        self.known: KnownWorker | None = None
        """The worker, once it was welcomed."""
        self.epoch = 0
        self.is_restored = False
        """Whether the worker remembers later sessions than the store does, which may be a backup."""
        self.left = False
        """Whether the worker said goodbye."""
        self.earlier: frozenset[str] = frozenset()
        """Commands of the worker that were on disk when this session began."""
        self.welcomed = False
        """Whether what the hello says has been compared with what is known."""
        self.loads = 0
        """Loads that have come on this stream."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the session has ended."""
        self.frames: list[ConnectResponse] = []
        """Frames that wait."""
        self._write: Write | None = None
        self._on_end: Callable[[], None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._reads: WorkerQueries[OutputChunk] = WorkerQueries(READ_PLACES)
        self._follows: WorkerQueries[OutputChunk] = WorkerQueries(FOLLOW_PLACES)
        self._plans: WorkerQueries[PlanAnswer] = WorkerQueries(PLAN_PLACES)
        self._checkpoints: WorkerQueries[CheckpointAnswer] = WorkerQueries(LIST_PLACES)

    def open(self, write: Write, on_end: Callable[[], None]) -> None:
        """Begins to send what waits.

        Args:
            write: Sends a frame.
            on_end: Called once, when the session ends or has ended.
        """
        self._write = write
        self._begin_to_write()
        if self.ended.done():
            on_end()
        else:
            self._on_end = on_end

    def send(self, frame: ConnectResponse) -> None:
        """Queues a frame. A worker that doesn't read loses its session, never a command: it is sent again."""
        if self.ended.done():
            return
        if len(self.frames) >= FRAME_LIMIT:
            self.end(session_pb2.GOODBYE_REASON_PROTOCOL_ERROR)
            return
        self.frames.append(frame)
        self._begin_to_write()

    def end(self, reason: GoodbyeReason.ValueType | None = None, error: FleetError | None = None) -> None:
        """Ends the stream after what is queued, with a goodbye if a reason is given. Only once."""
        if self.ended.done():
            return
        if reason is not None:
            goodbye = Goodbye(reason=reason, error=error.to_proto() if error else None)
            self.frames.append(ConnectResponse(goodbye=goodbye))
            self._begin_to_write()
        self.ended.set_result(None)
        self._reads.end()
        self._follows.end()
        self._plans.end()
        self._checkpoints.end()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def _begin_to_write(self) -> None:
        if self._write is not None and self._writing is None and self.frames:
            self._writing = asyncio.get_running_loop().create_task(self._write_frames(self._write))

    async def _write_frames(self, write: Write) -> None:
        try:
            while self.frames:
                if not await write(self.frames.pop(0)):
                    self._give_up()
        except Exception:  # a defect, of which the worker's stream would know nothing
            logger.exception("a write to worker %s has failed", self.hello.name)
            self._give_up()
        finally:
            self._writing = None

    def _give_up(self) -> None:
        self.frames.clear()
        self.end()

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until all that was queued is sent, or the time is over. None: without end."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=timeout_s)

    def drain(self, reconnect_after_s: float, reason: GoodbyeReason.ValueType | None = None) -> None:
        """Ends the stream, and asks the worker to connect again, not before so many seconds have passed."""
        drain = Drain(reconnect_after=duration(reconnect_after_s))
        self.send(ConnectResponse(drain=drain))
        self.end(reason)

    async def read_output(
        self, request: ReadOutput, timeout_s: float, *, follow: bool = False
    ) -> OutputChunk:
        """Asks the worker for a piece of output. Who follows waits for more, and holds up no other reader.

        Raises:
            FleetError: OUTPUT_UNAVAILABLE, the worker did not answer.
        """

        def send(question_id: str) -> None:
            request.read_id = question_id
            self.send(ConnectResponse(read_output=request))

        try:
            return await (self._follows if follow else self._reads).ask(send, timeout_s)
        except UnansweredError as error:
            raise FleetError(
                errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE,
                f"worker {self.hello.name} did not send the output: try again when it is connected",
            ) from error

    def answer_read(self, chunk: OutputChunk) -> None:
        """Hands a piece of output to whoever asked."""
        self._reads.answer(chunk.read_id, chunk)
        self._follows.answer(chunk.read_id, chunk)

    async def plan(self, query: PlanQuery, timeout_s: float) -> PlanAnswer:
        """Asks the worker what an operation would do.

        Raises:
            FleetError: WORKER_UNAVAILABLE, the worker did not answer.
        """

        def send(question_id: str) -> None:
            query.plan_id = question_id
            self.send(ConnectResponse(plan_query=query))

        try:
            return await self._plans.ask(send, timeout_s)
        except UnansweredError as error:
            name, agent = self.hello.name, self.hello.agent_version or "of an unknown version"
            why = (
                f"worker {name} went away while it was asked for a plan: ask again when it is connected"
                if error.ended
                else f"worker {name} (agent {agent}) sent no plan within {timeout_s:g} s: it is busy, so ask "
                "again later, or it is older than plans, so update it"
            )
            raise FleetError(errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE, why, worker=name) from error

    def answer_plan(self, answer: PlanAnswer) -> None:
        """Hands a plan to whoever asked."""
        self._plans.answer(answer.plan_id, answer)

    async def list_checkpoints(self, query: CheckpointQuery, timeout_s: float) -> CheckpointAnswer:
        """Asks the worker for some of the checkpoints on its disk.

        Raises:
            FleetError: WORKER_UNAVAILABLE, the worker did not answer.
        """

        def send(question_id: str) -> None:
            query.query_id = question_id
            self.send(ConnectResponse(checkpoint_query=query))

        try:
            return await self._checkpoints.ask(send, timeout_s)
        except UnansweredError as error:
            name = self.hello.name
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
                f"worker {name} did not list its checkpoints: ask again later, or update it",
                worker=name,
            ) from error

    def answer_checkpoints(self, answer: CheckpointAnswer) -> None:
        """Hands a list of checkpoints to whoever asked."""
        self._checkpoints.answer(answer.query_id, answer)
