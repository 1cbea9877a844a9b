"""A checkpointable application as the worker sees it: one call at a time, each with a deadline."""

import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, final

import trio
from leasehold.local.v1 import kernel_pb2
from leasehold.local.v1.kernel_pb2 import (
    KernelAnswer,
    KernelCall,
    KernelChunk,
    KernelHello,
    KernelMethod,
    KernelPayload,
    KernelReadiness,
)
from leasehold.local.v1.local_service_pb2 import ServeKernelResponse
from leasehold.v1 import errors_pb2, workload_pb2

from leasehold_worker.applications.stream import ApplicationStream, StreamLostError
from leasehold_worker.checkpoints.application_file import StoredCheckpoint
from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 65_536
ANSWER_TIMEOUT_S: Final = 10.0
"""Time for an application to answer a question."""

CANCEL_TIMEOUT_S: Final = 10.0
FIRST_POLL_S: Final = 0.01
LONGEST_POLL_S: Final = 0.25
"""Longest pause between two questions whether the application is quiescent."""

_WORDS: Final = {
    kernel_pb2.KERNEL_METHOD_CAN_CHECKPOINT: "say whether it can save itself",
    kernel_pb2.KERNEL_METHOD_SIZE_ESTIMATE: "estimate its size",
    kernel_pb2.KERNEL_METHOD_PREPARE: "prepare",
    kernel_pb2.KERNEL_METHOD_CANCEL: "go on",
    kernel_pb2.KERNEL_METHOD_IS_QUIESCENT: "say whether it is quiescent",
    kernel_pb2.KERNEL_METHOD_CHECKPOINT: "save itself",
    kernel_pb2.KERNEL_METHOD_RESTORE: "restore itself",
    kernel_pb2.KERNEL_METHOD_HEALTH: "report its health",
}
"""The methods as verbs, for messages."""

TEXT_LIMIT: Final = 1024
"""Characters of an application's text in messages."""

Sink = Callable[[bytes], Awaitable[None]]
"""Receives a piece of the saved state."""

Source = Callable[[], Awaitable[bytes]]
"""Returns the next piece of a checkpoint; none at the end."""


@final
class Application:
    """A registered application. Methods raise :class:`OperationError` if it fails or does not answer.

    Calls run one after the other, and a call waits for its predecessor within its own deadline. The answer to
    an abandoned call is dropped by the next one.

    Attributes:
        workload: Its workload.
        facts: Its id, kind and version.
    """

    def __init__(self, session: ApplicationStream, workload: Workload, hello: KernelHello) -> None:
        self.workload = workload
        self.facts = hello.kernel
        self._session = session
        self._turn = trio.Lock()
        self._ids = count(1)

    @property
    def is_gone(self) -> bool:
        """Whether its stream is over. The application may come back, as another object."""
        return self._session.gone.is_set()

    async def can_checkpoint(self, timeout_s: float = ANSWER_TIMEOUT_S) -> KernelReadiness:
        """Asks whether the application can save itself now, with the reason if not."""
        answer = await self._ask(kernel_pb2.KERNEL_METHOD_CAN_CHECKPOINT, "readiness", timeout_s)
        return answer.readiness

    @property
    def is_busy(self) -> bool:
        """Whether a call is running: saving may take long."""
        return self._turn.locked()

    async def size_estimate(self, timeout_s: float = ANSWER_TIMEOUT_S) -> int | None:
        """Asks for the number of bytes of a save. None: unknown; a negative number counts as unknown, too."""
        answer = await self._ask(kernel_pb2.KERNEL_METHOD_SIZE_ESTIMATE, "size_estimate", timeout_s)
        estimate = answer.size_estimate
        known = estimate.HasField("size_bytes") and estimate.size_bytes >= 0
        return estimate.size_bytes if known else None

    async def health(self) -> workload_pb2.KernelHealth.ValueType:
        """Asks for the health of the application."""
        return (await self._ask(kernel_pb2.KERNEL_METHOD_HEALTH, "health")).health

    async def is_quiescent(self) -> bool:
        """Asks whether the application is quiescent."""
        return (await self._ask(kernel_pb2.KERNEL_METHOD_IS_QUIESCENT, "quiescent")).quiescent

    async def prepare(self, timeout_s: float, cancel_timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        """Asks the application to quiesce and waits. If that fails, the application is told to continue.

        Args:
            timeout_s: Time to quiesce.
            cancel_timeout_s: Time to continue after a failure.

        Raises:
            OperationError: KERNEL_FAILED: the application failed, or did not quiesce in time.
        """
        try:
            with self._deadline("become quiescent", timeout_s):
                await self._ask(kernel_pb2.KERNEL_METHOD_PREPARE, "done", timeout_s)
                pause_s = FIRST_POLL_S
                while not await self.is_quiescent():
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_POLL_S)
        except BaseException:
            await self.undo(cancel_timeout_s)
            raise

    async def cancel(self, timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        """Undoes :meth:`prepare`: the application continues. Without a prepare it does nothing.

        An application that does not answer in time loses its stream, and continues as soon as it notices.

        Raises:
            OperationError: KERNEL_FAILED.
        """
        try:
            await self._ask(kernel_pb2.KERNEL_METHOD_CANCEL, "done", timeout_s)
        except OperationError:
            self._session.close()
            raise

    async def undo(self, timeout_s: float = CANCEL_TIMEOUT_S) -> str | None:
        """Like :meth:`cancel`, but shielded from cancellation.

        Returns:
            The failures, as text.
        """
        with trio.CancelScope(shield=True):
            try:
                await self.cancel(timeout_s)
            except OperationError as error:
                logger.warning("workload %s: %s", self.workload.name, error.message)
                return error.message
        return None

    async def checkpoint(self, sink: Sink, timeout_s: float) -> KernelPayload:
        """Has the quiescent application save itself.

        Args:
            sink: Receives the pieces, in order.
            timeout_s: Time for the whole save.

        Returns:
            The facts of the save, which agree with the pieces.

        Raises:
            OperationError: KERNEL_FAILED, CHECKPOINT_CORRUPT, or an error of the sink.
        """
        method = kernel_pb2.KERNEL_METHOD_CHECKPOINT
        digest = hashlib.sha256()
        size = 0
        with self._deadline(_WORDS[method], timeout_s):
            async with self._turn:
                call_id = await self._call(method)
                while True:
                    frame = await self._next(call_id)
                    if isinstance(frame, KernelAnswer):
                        break
                    digest.update(frame.data)
                    size += len(frame.data)
                    await sink(frame.data)
        saved = self._checked(frame, method, "saved").saved
        if (saved.size_bytes, saved.sha256) != (size, digest.digest()):
            raise OperationError(
                errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT,
                f"the application of workload {self.workload.name} announced "
                f"{saved.size_bytes} bytes and sent {size}: try again",
            )
        return saved

    async def restore(self, checkpoint: StoredCheckpoint, source: Source, timeout_s: float) -> None:
        """Restores the application before it begins.

        Without an answer the application loses its stream: it would read later frames as part of the
        checkpoint.

        Args:
            checkpoint: Facts of the checkpoint.
            source: Returns the payload, in pieces that fit into a frame.
            timeout_s: Time for the whole restore.

        Raises:
            OperationError: KERNEL_FAILED, or an error of the source.
        """
        method = kernel_pb2.KERNEL_METHOD_RESTORE
        header = checkpoint.header
        answered = False
        try:
            with self._deadline(_WORDS[method], timeout_s):
                async with self._turn:
                    call_id = await self._call(method, checkpoint.checkpoint_id)
                    while piece := await source():
                        await self._send(ServeKernelResponse(chunk=KernelChunk(call_id=call_id, data=piece)))
                    end = KernelPayload(
                        call_id=call_id,
                        size_bytes=header.size_bytes,
                        sha256=bytes.fromhex(header.sha256),
                        custom=header.custom,
                    )
                    await self._send(ServeKernelResponse(end=end))
                    frame = await self._next(call_id)
                    answered = True
        finally:
            if not answered:
                self._session.close()
        self._checked(frame, method, "done")

    async def _ask(
        self, method: KernelMethod.ValueType, result: str, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> KernelAnswer:
        with self._deadline(_WORDS[method], timeout_s):
            async with self._turn:
                call_id = await self._call(method)
                frame = await self._next(call_id)
        return self._checked(frame, method, result)

    async def _call(self, method: KernelMethod.ValueType, checkpoint_id: str = "") -> int:
        call_id = next(self._ids)
        call = KernelCall(call_id=call_id, method=method, checkpoint_id=checkpoint_id)
        await self._send(ServeKernelResponse(call=call))
        return call_id

    async def _send(self, frame: ServeKernelResponse) -> None:
        await self._session.send(frame)

    async def _next(self, call_id: int) -> KernelAnswer | KernelChunk:
        """The next frame of a call. Frames of earlier calls are dropped."""
        while True:
            frame = await self._session.receive()
            match frame.WhichOneof("frame"):
                case "answer" if frame.answer.call_id == call_id:
                    return frame.answer
                case "chunk" if frame.chunk.call_id == call_id:
                    return frame.chunk
                case _:
                    pass

    def _checked(
        self, frame: KernelAnswer | KernelChunk, method: KernelMethod.ValueType, result: str
    ) -> KernelAnswer:
        """The answer to a call.

        Raises:
            OperationError: KERNEL_FAILED: the call failed, or the application answered another call.
        """
        if isinstance(frame, KernelAnswer) and frame.WhichOneof("result") == result:
            return frame
        if isinstance(frame, KernelAnswer) and frame.WhichOneof("result") == "failure":
            raise self._failed(f"failed to {_WORDS[method]}: {frame.failure[:TEXT_LIMIT]}")
        raise self._failed(
            f"gave the wrong answer when asked to {_WORDS[method]}: check its version of Leasehold"
        )

    @contextmanager
    def _deadline(self, what: str, timeout_s: float) -> Iterator[None]:
        try:
            with trio.fail_after(timeout_s):
                yield
        except trio.TooSlowError:
            raise self._failed(
                f"did not {what} within {timeout_s:g} s: check what it is doing, or allow more time"
            ) from None
        except StreamLostError:
            raise self._failed(f"disconnected before it could {what}: see its output") from None

    def _failed(self, how: str) -> OperationError:
        return OperationError(
            errors_pb2.ERROR_REASON_KERNEL_FAILED,
            f"the application of workload {self.workload.name} {how}",
            {"workload_id": self.workload.workload_id, "kernel_id": self.facts.kernel_id},
        )
