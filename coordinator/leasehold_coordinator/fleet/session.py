"""A worker's live stream: its queue of frames, its end, and questions to the worker. The asyncio side."""

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

from leasehold_coordinator.access.identities import Identity
from leasehold_coordinator.core.known_worker import KnownWorker, SessionId
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import counted_caller
from leasehold_coordinator.fleet.worker_queries import UnansweredError, WorkerQueries
from leasehold_coordinator.timestamps import duration

logger = logging.getLogger(__name__)

READ_PLACES: Final = 4
FOLLOW_PLACES: Final = 12
"""Most concurrent reads of output per worker: by readers of the present output, and by followers."""

PLAN_PLACES: Final = 4
LIST_PLACES: Final = 2
"""Most concurrent questions per worker: for plans, and for checkpoints. One caller has half of each."""

FRAME_LIMIT: Final = 256
"""Most frames that may wait for a worker. Beyond the limit, the session of the worker ends."""

Write: TypeAlias = Callable[[ConnectResponse], Awaitable[bool]]
"""Sends a frame. False: the worker has disconnected."""


@final
class Session:
    """One worker's stream.

    Most of thousands of streams are idle, so the writer task exists only while a frame waits.
    """

    def __init__(self, hello: Hello) -> None:
        self.session_id = SessionId(f"s-{uuid.uuid4().hex[:12]}")
        self.hello = hello
        self.repeated_command_ids = frozenset(hello.commands_unacknowledged)
        """Ids of commands whose outcomes come again. The leases of the hello have their effects already."""
        self.identity: Identity | None = None
        """The worker's identity. None: not yet established."""
        self.address = ""
        """The worker's host, as gRPC writes it."""
        self.known: KnownWorker | None = None
        """The worker's record. None: the worker is not yet welcomed."""
        self.epoch = 0
        self.is_restored = False
        """Whether the worker remembers a later session than the store, which may be a backup."""
        self.is_encrypted = True
        """Whether the connection has TLS."""
        self.left = False
        """Whether the worker said goodbye."""
        self.earlier: frozenset[str] = frozenset()
        """Ids of the worker's commands that were on disk when this session began."""
        self.is_certified = False
        """Whether a client certificate proves the worker's name."""
        self.welcomed = False
        """Whether the hello was compared with the ledger."""
        self.loads = 0
        """Number of loads on this stream."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the session has ended."""
        self.frames: list[ConnectResponse] = []
        """Waiting frames."""
        self._write: Write | None = None
        self._on_end: Callable[[], None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._reads: WorkerQueries[OutputChunk] = WorkerQueries(READ_PLACES, READ_PLACES)
        self._follows: WorkerQueries[OutputChunk] = WorkerQueries(FOLLOW_PLACES, FOLLOW_PLACES)
        self._plans: WorkerQueries[PlanAnswer] = WorkerQueries(PLAN_PLACES, PLAN_PLACES // 2)
        self._checkpoints: WorkerQueries[CheckpointAnswer] = WorkerQueries(LIST_PLACES, LIST_PLACES // 2)

    def open(self, write: Write, on_end: Callable[[], None]) -> None:
        """Starts to send the waiting frames.

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
        """Queues a frame. At FRAME_LIMIT the session ends. The next session sends its commands again."""
        if self.ended.done():
            return
        if len(self.frames) >= FRAME_LIMIT:
            self.end(session_pb2.GOODBYE_REASON_PROTOCOL_ERROR)
            return
        self.frames.append(frame)
        self._begin_to_write()

    def end(self, reason: GoodbyeReason.ValueType | None = None, error: FleetError | None = None) -> None:
        """Ends the stream after the queued frames and, if a reason is given, a goodbye. Idempotent."""
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
        except Exception:  # a defect, which must end the stream
            logger.exception("a write to worker %s failed", self.hello.name)
            self._give_up()
        finally:
            self._writing = None

    def _give_up(self) -> None:
        self.frames.clear()
        self.end()

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until all queued frames are sent, or the timeout expires. None: no timeout."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=timeout_s)

    def drain(self, reconnect_after_s: float, reason: GoodbyeReason.ValueType | None = None) -> None:
        """Ends the stream, and asks the worker to reconnect after a delay."""
        drain = Drain(reconnect_after=duration(reconnect_after_s))
        self.send(ConnectResponse(drain=drain))
        self.end(reason)

    async def read_output(
        self, request: ReadOutput, timeout_s: float, *, follow: bool = False
    ) -> OutputChunk:
        """Asks the worker for a chunk of output. Followers have their own places, and delay no other reader.

        Raises:
            FleetError: WORKER_UNAVAILABLE, the worker did not answer.
        """

        def send(question_id: str) -> None:
            request.read_id = question_id
            self.send(ConnectResponse(read_output=request))

        try:
            return await (self._follows if follow else self._reads).ask(send, timeout_s, counted_caller())
        except UnansweredError as error:
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
                f"worker {self.hello.name} did not send the output: try again when it is connected",
            ) from error

    def answer_read(self, chunk: OutputChunk) -> None:
        """Delivers a chunk of output to its reader."""
        self._reads.answer(chunk.read_id, chunk)
        self._follows.answer(chunk.read_id, chunk)

    async def plan(self, query: PlanQuery, timeout_s: float) -> PlanAnswer:
        """Asks the worker for the plan of an operation.

        Raises:
            FleetError: WORKER_UNAVAILABLE, the worker did not answer.
        """

        def send(question_id: str) -> None:
            query.plan_id = question_id
            self.send(ConnectResponse(plan_query=query))

        try:
            return await self._plans.ask(send, timeout_s, counted_caller())
        except UnansweredError as error:
            name = self.hello.name
            why = (
                f"worker {name} disconnected before it sent a plan: ask again when it is connected"
                if error.ended
                else f"worker {name} sent no plan within {timeout_s:g} s, probably because a driver call or "
                "a volume hangs: ask again later, or look at the host"
            )
            raise FleetError(errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE, why, worker=name) from error

    def answer_plan(self, answer: PlanAnswer) -> None:
        """Delivers a plan to its requester."""
        self._plans.answer(answer.plan_id, answer)

    async def list_checkpoints(self, query: CheckpointQuery, timeout_s: float) -> CheckpointAnswer:
        """Asks the worker for a page of the checkpoints on its disk.

        A question about all checkpoints is nobody's: callers share the answer.

        Raises:
            FleetError: WORKER_UNAVAILABLE, the worker did not answer.
        """

        def send(question_id: str) -> None:
            query.query_id = question_id
            self.send(ConnectResponse(checkpoint_query=query))

        try:
            caller = counted_caller() if query.workload_id else ""
            return await self._checkpoints.ask(send, timeout_s, caller)
        except UnansweredError as error:
            name = self.hello.name
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
                f"worker {name} did not list its checkpoints: ask again later, or update it",
                worker=name,
            ) from error

    def answer_checkpoints(self, answer: CheckpointAnswer) -> None:
        """Delivers a page of checkpoints to its requester."""
        self._checkpoints.answer(answer.query_id, answer)
