"""The live streams: what goes down each, and its end. The asyncio side of a session."""

import asyncio
import uuid
from typing import Final, final

from leasehold.v1 import errors_pb2, worker_session_pb2
from leasehold.v1.worker_session_pb2 import (
    ConnectResponse,
    Goodbye,
    GoodbyeReason,
    Hello,
    OutputChunk,
    ReadOutput,
)

from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.registry import KnownWorker, SessionId

FRAME_LIMIT: Final = 256
"""Frames that may wait for a worker. More means that it doesn't read: its session ends."""


@final
class Session:
    """One worker's stream."""

    def __init__(self, hello: Hello) -> None:
        self.session_id = SessionId(f"s-{uuid.uuid4().hex[:12]}")
        self.hello = hello
        self.known: KnownWorker | None = None
        """The worker, once it was welcomed."""
        self.epoch = 0
        self.left = False
        """Whether the worker said goodbye."""
        self.ended = asyncio.Event()
        self.frames: asyncio.Queue[ConnectResponse | None] = asyncio.Queue(FRAME_LIMIT + 2)
        """Frames to send; None ends the stream."""
        self._reads: dict[str, asyncio.Future[OutputChunk]] = {}

    def send(self, frame: ConnectResponse) -> None:
        """Queues a frame. A worker that doesn't read loses its session, never a command: it is sent again."""
        if self.ended.is_set():
            return
        if self.frames.qsize() >= FRAME_LIMIT:
            self.end(worker_session_pb2.GOODBYE_REASON_PROTOCOL_ERROR)
            return
        self.frames.put_nowait(frame)

    def end(self, reason: GoodbyeReason.ValueType | None = None, error: FleetError | None = None) -> None:
        """Ends the stream after what is queued, with a goodbye if a reason is given. Only once."""
        if self.ended.is_set():
            return
        if reason is not None:
            goodbye = Goodbye(reason=reason, error=error.to_proto() if error else None)
            self.frames.put_nowait(ConnectResponse(goodbye=goodbye))
        self.frames.put_nowait(None)
        self.ended.set()
        for waiting in self._reads.values():
            waiting.cancel()

    async def read_output(self, request: ReadOutput, timeout_s: float) -> OutputChunk:
        """Asks the worker for a piece of output.

        Raises:
            FleetError: OUTPUT_UNAVAILABLE, the worker did not answer.
        """
        if self.ended.is_set():
            raise self._unread()
        request.read_id = uuid.uuid4().hex
        answer: asyncio.Future[OutputChunk] = asyncio.get_running_loop().create_future()
        self._reads[request.read_id] = answer
        self.send(ConnectResponse(read_output=request))
        try:
            done, _ = await asyncio.wait({answer}, timeout=timeout_s)
            if not done or answer.cancelled():
                raise self._unread()
            return answer.result()
        finally:
            del self._reads[request.read_id]

    def _unread(self) -> FleetError:
        return FleetError(
            errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE,
            f"worker {self.hello.name} did not send the output: try again when it is connected",
        )

    def answer_read(self, chunk: OutputChunk) -> None:
        """Hands a piece of output to whoever asked; one that came too late is dropped."""
        waiting = self._reads.get(chunk.read_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(chunk)
