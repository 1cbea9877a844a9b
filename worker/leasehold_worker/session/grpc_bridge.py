"""gRPC's synchronous stream, bridged to trio.

One thread reads responses and passes them to trio through its token. gRPC's own thread takes requests from
the outbox. Cancelling the call ends both.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol, TypeAlias, cast

import grpc
import trio
from google.protobuf.message import DecodeError
from leasehold.v1 import errors_pb2
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import ConnectRequest, ConnectResponse, GoodbyeReason

from leasehold_worker.errors import OperationError
from leasehold_worker.session.outbox import Outbox
from leasehold_worker.threads import require_threads, run_in_thread

INBOX_LIMIT: Final = 256
"""Received frames that may wait. At the limit reading stops, and gRPC slows the coordinator down."""

STREAM_THREADS: Final = 3
"""Threads of a stream: the channel's, and those that send and receive."""

REFUSED_BACKOFF_S: Final = 60.0
"""Wait after an answer that a retry does not change."""

_SERVICE: Final = session_pb2.DESCRIPTOR.services_by_name["SessionService"]
_MALFORMED: Final = "the received bytes are not a frame of this protocol"
_FINAL_CODES: Final = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}


class SessionEndError(Exception):
    """The end of a session, however it ends.

    Attributes:
        why: Reason for the log.
        retry_after_s: Wait before the next session. None: the usual back-off.
        reason: Reason why the worker leaves. None: the coordinator left, or is gone.
        error: Details for the coordinator.
    """

    def __init__(
        self,
        why: str,
        retry_after_s: float | None = None,
        reason: GoodbyeReason.ValueType | None = None,
        error: OperationError | None = None,
    ) -> None:
        super().__init__(why)
        self.why = why
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.error = error


Incoming: TypeAlias = ConnectResponse | SessionEndError
"""A frame, or the end."""


class _Call(Protocol):
    """The part of a gRPC call that the bridge uses."""

    def __iter__(self) -> Iterator[ConnectResponse | bytes]: ...
    def cancel(self) -> bool: ...


def violation(message: str) -> SessionEndError:
    """The coordinator broke the protocol."""
    return SessionEndError(
        f"protocol error: {message}",
        REFUSED_BACKOFF_S,
        session_pb2.GOODBYE_REASON_PROTOCOL_ERROR,
        OperationError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, message),
    )


@asynccontextmanager
async def open_stream(
    channel: grpc.Channel, outbox: Outbox
) -> AsyncIterator[trio.MemoryReceiveChannel[Incoming]]:
    """A stream to the coordinator, whose last item is its end.

    Raises:
        BlockingIOError: The threads of a stream can't be started.
    """
    connect = channel.stream_stream(
        f"/{_SERVICE.full_name}/Connect",
        request_serializer=ConnectRequest.SerializeToString,
        response_deserializer=_parse,
    )
    # If gRPC can't start the channel's thread, the channel's close waits forever, and so does its finalizer.
    require_threads(STREAM_THREADS)
    call = cast("_Call", connect(outbox))
    async with trio.open_nursery() as nursery:
        frames = start_reader(nursery, call)
        try:
            yield frames
        finally:
            outbox.close()
            call.cancel()
            frames.close()


def start_reader(nursery: trio.Nursery, call: _Call) -> trio.MemoryReceiveChannel[Incoming]:
    """Starts the thread that reads responses. It ends once the call is cancelled and the channel closed."""
    send, receive = trio.open_memory_channel[Incoming](INBOX_LIMIT)

    def read() -> None:
        with suppress(trio.BrokenResourceError):  # the reader has ended
            end = _read_to_the_end(call, lambda frame: trio.from_thread.run(send.send, frame))
            trio.from_thread.run(send.send, end)

    async def read_in_thread() -> None:
        with trio.CancelScope(shield=True):  # the thread ends soon after the call is cancelled
            await run_in_thread(read)

    nursery.start_soon(read_in_thread)
    return receive


def _read_to_the_end(call: _Call, deliver: Callable[[ConnectResponse], None]) -> SessionEndError:
    try:
        for frame in call:
            if isinstance(frame, bytes):
                return violation(_MALFORMED)
            deliver(frame)
    except grpc.RpcError as error:
        status = cast("grpc.Call", error)  # every error of a stub is its call too
        why = f"{status.code().name}: {status.details()}"
        if status.code() is grpc.StatusCode.UNIMPLEMENTED:
            why += " (is it the coordinator's address for workers?)"
        return SessionEndError(why, REFUSED_BACKOFF_S if status.code() in _FINAL_CODES else None)
    return SessionEndError("the coordinator closed the stream without a goodbye")


def _parse(data: bytes) -> ConnectResponse | bytes:
    """A frame, or the bytes if they are not a frame: an exception here would end the stream silently."""
    try:
        return ConnectResponse.FromString(data)
    except DecodeError:
        return data
