"""Execution of the worker's calls to an application, one call at a time, in any thread."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar, final

from leasehold.local.v1 import kernel_pb2
from leasehold.local.v1.kernel_pb2 import (
    KernelAnswer,
    KernelCall,
    KernelChunk,
    KernelPayload,
    KernelReadiness,
    KernelSizeEstimate,
)
from leasehold.local.v1.local_service_pb2 import ServeKernelRequest, ServeKernelResponse

from leasehold_client.kernel.protocols import CheckpointableKernel, KernelFacts

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 65_536
TEXT_LIMIT: Final = 1024

C = TypeVar("C")

Send = Callable[[ServeKernelRequest], None]


class StreamOverError(Exception):
    """The stream to the worker has ended, so no answer is expected."""


@final
class KernelCalls(Generic[C]):
    """Calls one application. An exception becomes a failure answer."""

    def __init__(self, kernel: CheckpointableKernel[C], facts: KernelFacts[C]) -> None:
        self._kernel = kernel
        self._facts = facts
        self._prepared = False

    def answer(self, call: KernelCall, send: Send) -> KernelAnswer:
        """Executes a call and returns its answer. The chunks of a checkpoint are sent before the answer.

        Raises:
            StreamOverError: The stream ended during the call.
        """
        try:
            answer = self._answer(call, send)
        except StreamOverError:
            raise
        except Exception as error:
            logger.exception("the application raised an exception")
            answer = failure(error)
        answer.call_id = call.call_id
        return answer

    def restore(self, call: KernelCall, frames: Iterator[ServeKernelResponse], refusal: str) -> KernelAnswer:
        """Receives a checkpoint and restores the application.

        Args:
            call: The call.
            frames: The frames after the call.
            refusal: Reason of a refusal. Empty: no refusal.

        Raises:
            StreamOverError: The stream ended during the transfer.
        """
        data = _receive(call.call_id, frames)
        try:
            if refusal:
                raise RuntimeError(refusal)
            if data is None:
                raise ValueError("the received checkpoint is damaged: its size or digest is wrong")
            self._kernel.restore(self._facts.codec.decode(bytes(data)))
        except Exception as error:
            logger.exception("the restore from checkpoint %s failed", call.checkpoint_id)
            answer = failure(error)
        else:
            answer = KernelAnswer(done=kernel_pb2.KernelDone())
        answer.call_id = call.call_id
        return answer

    def undo(self) -> None:
        """Calls ``cancel`` if ``prepare`` was called before."""
        if self._prepared:
            self._kernel.cancel()
            self._prepared = (
                False  # after an exception, cancel is repeated at the end of the stream at the latest
            )

    def _answer(self, call: KernelCall, send: Send) -> KernelAnswer:
        match call.method:
            case kernel_pb2.KERNEL_METHOD_CAN_CHECKPOINT:
                ready, reason = self._kernel.can_checkpoint()
                readiness = KernelReadiness(ready=ready, reason=_sendable(reason))
                return KernelAnswer(readiness=readiness)
            case kernel_pb2.KERNEL_METHOD_SIZE_ESTIMATE:
                estimate = KernelSizeEstimate(size_bytes=self._kernel.checkpoint_size_estimate())
                return KernelAnswer(size_estimate=estimate)
            case kernel_pb2.KERNEL_METHOD_PREPARE:
                self._prepared = True
                self._kernel.prepare()
                return KernelAnswer(done=kernel_pb2.KernelDone())
            case kernel_pb2.KERNEL_METHOD_CANCEL:
                self.undo()
                return KernelAnswer(done=kernel_pb2.KernelDone())
            case kernel_pb2.KERNEL_METHOD_IS_QUIESCENT:
                return KernelAnswer(quiescent=self._kernel.is_quiescent())
            case kernel_pb2.KERNEL_METHOD_CHECKPOINT:
                return KernelAnswer(saved=self._save(call.call_id, send))
            case kernel_pb2.KERNEL_METHOD_HEALTH:
                return KernelAnswer(health=self._kernel.health().value)
            case _:
                raise ValueError(
                    f"the method {call.method} is unknown to this version of Leasehold: update Leasehold"
                )

    def _save(self, call_id: int, send: Send) -> KernelPayload:
        checkpoint = self._kernel.checkpoint()
        custom = self._facts.describe(checkpoint) if self._facts.describe else {}
        size = 0
        digest = hashlib.sha256()
        for data in _chunks(self._facts.codec.encode(checkpoint)):
            size += len(data)
            digest.update(data)
            send(ServeKernelRequest(chunk=KernelChunk(call_id=call_id, data=data)))
        return KernelPayload(call_id=call_id, size_bytes=size, sha256=digest.digest(), custom=custom)


def failure(error: Exception) -> KernelAnswer:
    """Converts an exception to a failure answer."""
    try:
        text = str(error)
    except Exception:  # __str__ of an application's error may raise too
        logger.exception("the text of an application's error can't be read")
        text = "its text can't be read"
    return KernelAnswer(failure=_sendable(f"{type(error).__name__}: {text}"))


def _sendable(text: str) -> str:
    """Bounds a text of the application and escapes surrogates, which a message can't contain.

    Surrogates occur in errors with paths that are not UTF-8.
    """
    return text[:TEXT_LIMIT].encode(errors="backslashreplace").decode()[:TEXT_LIMIT]


def _chunks(data: bytes | Iterable[bytes]) -> Iterator[bytes]:
    """Splits bytes, or pieces of any size, into chunks of equal size."""
    pieces = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
    room = bytearray()
    for piece in pieces:
        left = memoryview(piece).cast("B")
        while left:
            taken = CHUNK_BYTES - len(room)
            room += left[:taken]
            left = left[taken:]
            if len(room) == CHUNK_BYTES:
                yield bytes(room)
                room.clear()
    if room:
        yield bytes(room)


def _receive(call_id: int, frames: Iterator[ServeKernelResponse]) -> bytearray | None:
    """Receives a whole checkpoint. None: its size or digest is wrong."""
    data = bytearray()
    for frame in frames:
        if frame.WhichOneof("frame") == "chunk" and frame.chunk.call_id == call_id:
            data += frame.chunk.data
        elif frame.WhichOneof("frame") == "end" and frame.end.call_id == call_id:
            whole = (len(data), hashlib.sha256(data).digest()) == (frame.end.size_bytes, frame.end.sha256)
            return data if whole else None
        else:
            return None
    raise StreamOverError
