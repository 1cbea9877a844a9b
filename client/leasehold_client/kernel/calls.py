"""The worker's calls to a kernel, done and answered. Any thread, one call at a time."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar, final

from leasehold.v1 import local_pb2
from leasehold.v1.local_pb2 import (
    KernelAnswer,
    KernelCall,
    KernelChunk,
    KernelPayload,
    KernelReadiness,
    ServeKernelRequest,
    ServeKernelResponse,
)

from leasehold_client.kernel.protocols import CheckpointableKernel, KernelFacts

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 65_536
TEXT_LIMIT: Final = 1024

C = TypeVar("C")

Send = Callable[[ServeKernelRequest], None]


class StreamOverError(Exception):
    """The stream to the worker is over: nobody waits for an answer."""


@final
class KernelCalls(Generic[C]):
    """Calls one kernel. What it raises becomes the answer that it failed."""

    def __init__(self, kernel: CheckpointableKernel[C], facts: KernelFacts[C]) -> None:
        self._kernel = kernel
        self._facts = facts
        self._prepared = False

    def answer(self, call: KernelCall, send: Send) -> KernelAnswer:
        """Does what is asked; what is saved is sent in chunks before.

        Raises:
            StreamOverError: Nobody waits for it any more.
        """
        try:
            answer = self._answer(call, send)
        except StreamOverError:
            raise
        except Exception as error:
            logger.exception("the kernel failed")
            answer = failure(error)
        answer.call_id = call.call_id
        return answer

    def restore(self, call: KernelCall, frames: Iterator[ServeKernelResponse], refusal: str) -> KernelAnswer:
        """Takes in what was saved, and restores the kernel from it.

        Args:
            call: The call.
            frames: What follows it.
            refusal: Why it is not to be restored. Empty: it is.

        Raises:
            StreamOverError: The worker went away meanwhile.
        """
        data = _receive(call.call_id, frames)
        try:
            if refusal:
                raise RuntimeError(refusal)
            if data is None:
                raise ValueError("what arrived is not what was saved")
            self._kernel.restore(self._facts.codec.decode(bytes(data)))
        except Exception as error:
            logger.exception("the kernel could not be restored from checkpoint %s", call.checkpoint_id)
            answer = failure(error)
        else:
            answer = KernelAnswer(done=local_pb2.KernelDone())
        answer.call_id = call.call_id
        return answer

    def undo(self) -> None:
        """Lets the kernel go on if it was brought to rest, or asked to."""
        if self._prepared:
            self._kernel.cancel()
            self._prepared = False  # one that raised is called again, when the worker goes away at the latest

    def _answer(self, call: KernelCall, send: Send) -> KernelAnswer:
        match call.method:
            case local_pb2.KERNEL_METHOD_CAN_CHECKPOINT:
                ready, reason = self._kernel.can_checkpoint()
                readiness = KernelReadiness(ready=ready, reason=_sendable(reason))
                return KernelAnswer(readiness=readiness)
            case local_pb2.KERNEL_METHOD_SIZE_ESTIMATE:
                return KernelAnswer(size_bytes=self._kernel.checkpoint_size_estimate())
            case local_pb2.KERNEL_METHOD_PREPARE:
                self._prepared = True
                self._kernel.prepare()
                return KernelAnswer(done=local_pb2.KernelDone())
            case local_pb2.KERNEL_METHOD_CANCEL:
                self.undo()
                return KernelAnswer(done=local_pb2.KernelDone())
            case local_pb2.KERNEL_METHOD_IS_QUIESCENT:
                return KernelAnswer(quiescent=self._kernel.is_quiescent())
            case local_pb2.KERNEL_METHOD_CHECKPOINT:
                return KernelAnswer(saved=self._save(call.call_id, send))
            case local_pb2.KERNEL_METHOD_HEALTH:
                return KernelAnswer(health=self._kernel.health().value)
            case _:
                raise ValueError(f"this version of Leasehold knows no call {call.method}: update it")

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
    """The answer that something failed."""
    try:
        text = str(error)
    except Exception:  # of the application: an error that can't even be shown is a failure too
        logger.exception("the text of a kernel's error can't be read")
        text = "its text can't be read"
    return KernelAnswer(failure=_sendable(f"{type(error).__name__}: {text}"))


def _sendable(text: str) -> str:
    """Text of the application as a message may have it: bounded, and with halves of characters escaped.

    A path that is not UTF-8 has such halves, and errors name paths.
    """
    return text[:TEXT_LIMIT].encode(errors="backslashreplace").decode()[:TEXT_LIMIT]


def _chunks(data: bytes | Iterable[bytes]) -> Iterator[bytes]:
    """Cuts bytes, or joins and cuts pieces of any size, to chunks of one size."""
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
    """All that follows a call. None: it is not what its end says."""
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
