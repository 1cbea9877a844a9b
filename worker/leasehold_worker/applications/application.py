"""An application that saves itself, as the worker calls it: one call at a time, each with a deadline."""

import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, local_pb2, workload_pb2
from leasehold.v1.local_pb2 import (
    KernelAnswer,
    KernelCall,
    KernelChunk,
    KernelHello,
    KernelMethod,
    KernelPayload,
    KernelReadiness,
    ServeKernelResponse,
)

from leasehold_worker.applications.stream import ApplicationStream, StreamLostError
from leasehold_worker.checkpoints.application_file import StoredCheckpoint
from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 65_536
ANSWER_TIMEOUT_S: Final = 10.0
"""How long an application may take to answer a question."""

CANCEL_TIMEOUT_S: Final = 10.0
FIRST_POLL_S: Final = 0.01
LONGEST_POLL_S: Final = 0.25
"""Between two questions whether it is at rest."""

_WORDS: Final = {
    local_pb2.KERNEL_METHOD_CAN_CHECKPOINT: "say whether it can save itself",
    local_pb2.KERNEL_METHOD_SIZE_ESTIMATE: "estimate its size",
    local_pb2.KERNEL_METHOD_PREPARE: "prepare",
    local_pb2.KERNEL_METHOD_CANCEL: "go on",
    local_pb2.KERNEL_METHOD_IS_QUIESCENT: "say whether it is quiescent",
    local_pb2.KERNEL_METHOD_CHECKPOINT: "save itself",
    local_pb2.KERNEL_METHOD_RESTORE: "restore itself",
    local_pb2.KERNEL_METHOD_HEALTH: "report its health",
}
"""What it is to do, for people."""

TEXT_LIMIT: Final = 1024
"""Characters that are told of what an application says."""

Sink = Callable[[bytes], Awaitable[None]]
"""Takes a piece of what an application saves."""

Source = Callable[[], Awaitable[bytes]]
"""Gives the next piece of what it is restored from; none at the end."""


@final
class Application:
    """A registered application. Methods raise :class:`OperationError` where it fails or does not answer.

    It answers one call after the other: a call waits for its turn within its own deadline. What comes of a
    call that nobody waits for any more is thrown away by the next one.

    Attributes:
        workload: The workload that it belongs to.
        facts: Which application it is.
    """

    def __init__(self, session: ApplicationStream, workload: Workload, hello: KernelHello) -> None:
        self.workload = workload
        self.facts = hello.kernel
        self._session = session
        self._turn = trio.Lock()
        self._ids = count(1)

    @property
    def is_gone(self) -> bool:
        """Whether its stream is over. It may come back, as another object."""
        return self._session.gone.is_set()

    async def can_checkpoint(self, timeout_s: float = ANSWER_TIMEOUT_S) -> KernelReadiness:
        """Asks whether it can save itself now, and why not."""
        answer = await self._ask(local_pb2.KERNEL_METHOD_CAN_CHECKPOINT, "readiness", timeout_s)
        return answer.readiness

    @property
    def is_busy(self) -> bool:
        """Whether it is being called: saving itself may take long."""
        return self._turn.locked()

    async def size_estimate(self, timeout_s: float = ANSWER_TIMEOUT_S) -> int:
        """Asks how many bytes it would save. 0: it doesn't know."""
        return (await self._ask(local_pb2.KERNEL_METHOD_SIZE_ESTIMATE, "size_bytes", timeout_s)).size_bytes

    async def health(self, timeout_s: float = ANSWER_TIMEOUT_S) -> workload_pb2.KernelHealth.ValueType:
        """Asks how it is."""
        return (await self._ask(local_pb2.KERNEL_METHOD_HEALTH, "health", timeout_s)).health

    async def is_quiescent(self, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
        """Asks whether it is at rest."""
        return (await self._ask(local_pb2.KERNEL_METHOD_IS_QUIESCENT, "quiescent", timeout_s)).quiescent

    async def prepare(self, timeout_s: float, cancel_timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        """Brings it to rest, and waits until it is. Whatever keeps it from that, it goes on.

        Args:
            timeout_s: How long that may take.
            cancel_timeout_s: How long it may take to go on, where it failed.

        Raises:
            OperationError: KERNEL_FAILED: it failed, or was not at rest in time.
        """
        try:
            with self._deadline("become quiescent", timeout_s):
                await self._ask(local_pb2.KERNEL_METHOD_PREPARE, "done", timeout_s)
                pause_s = FIRST_POLL_S
                while not await self.is_quiescent():
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_POLL_S)
        except BaseException:
            await self.undo(cancel_timeout_s)
            raise

    async def cancel(self, timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        """Undoes :meth:`prepare`: it goes on. Does nothing where nothing is to be undone.

        One that does not answer in time loses its stream. It goes on by itself as soon as it sees that.

        Raises:
            OperationError: KERNEL_FAILED.
        """
        try:
            await self._ask(local_pb2.KERNEL_METHOD_CANCEL, "done", timeout_s)
        except OperationError:
            self._session.close()
            raise

    async def undo(self, timeout_s: float = CANCEL_TIMEOUT_S) -> str | None:
        """As :meth:`cancel`, whatever happens around it.

        Returns:
            What went wrong, for people.
        """
        with trio.CancelScope(shield=True):
            try:
                await self.cancel(timeout_s)
            except OperationError as error:
                logger.warning("workload %s: %s", self.workload.name, error.message)
                return error.message
        return None

    async def checkpoint(self, sink: Sink, timeout_s: float) -> KernelPayload:
        """Has it save itself, at rest.

        Args:
            sink: Takes the pieces, in their order.
            timeout_s: For all of it.

        Returns:
            What it says that it saved, which is what the sink was given.

        Raises:
            OperationError: KERNEL_FAILED, CHECKPOINT_CORRUPT, or what the sink raises.
        """
        method = local_pb2.KERNEL_METHOD_CHECKPOINT
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
        """Has it become what was saved, before it begins.

        Unless it answers, it loses its stream: it would take what follows for more of the checkpoint.

        Args:
            checkpoint: What it is restored from.
            source: Gives the payload, in pieces that a frame can carry.
            timeout_s: For all of it.

        Raises:
            OperationError: KERNEL_FAILED, or what the source raises.
        """
        method = local_pb2.KERNEL_METHOD_RESTORE
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

    async def _ask(self, method: KernelMethod.ValueType, result: str, timeout_s: float) -> KernelAnswer:
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
        """The next frame of a call. Those of earlier ones are thrown away."""
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
            OperationError: KERNEL_FAILED: it failed, or is the answer to something else.
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
