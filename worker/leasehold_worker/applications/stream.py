"""One stream of a checkpointable application: frames between trio and gRPC's threads, both ways.

Two threads serve a stream, one per direction. Both wait on trio's side for bounded channels, so a slow side
slows the other, and nothing piles up.
"""

from contextlib import suppress
from typing import Final, final

import trio
from leasehold.local.v1.local_service_pb2 import ServeKernelRequest, ServeKernelResponse

from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer

QUEUE_LIMIT: Final = 4
"""Frames that wait, each way."""


class StreamLostError(Exception):
    """The application's stream is over."""


@final
class ApplicationStream:
    """A stream. Either side can close it, for good.

    Attributes:
        peer: The process at the other end.
        gone: Set once it is closed.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.gone = trio.Event()
        self._taken_in, self._received = trio.open_memory_channel[ServeKernelRequest](QUEUE_LIMIT)
        self._sent, self._handed_out = trio.open_memory_channel[ServeKernelResponse | OperationError](
            QUEUE_LIMIT
        )

    async def send(self, frame: ServeKernelResponse) -> None:
        """Sends a frame, once there is room.

        Raises:
            StreamLostError: The stream is over.
        """
        try:
            await self._sent.send(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise StreamLostError from None

    async def receive(self) -> ServeKernelRequest:
        """Waits for the next frame.

        Raises:
            StreamLostError: The stream is over.
        """
        try:
            return await self._received.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise StreamLostError from None

    def close(self, refusal: OperationError | None = None) -> None:
        """Ends the stream; frames sent before are still delivered.

        Args:
            refusal: The reason of a refusal.
        """
        if refusal is not None and not self.gone.is_set():
            with suppress(trio.WouldBlock):  # the peer does not read, so it sees only the end of the stream
                self._sent.send_nowait(refusal)
        self._sent.close()
        self._received.close()
        self.gone.set()

    def drop(self) -> None:
        """Closes this side after the application has closed the stream. Pending calls end."""
        self.close()
        self._handed_out.close()
        self._taken_in.close()

    async def take_in(self, frame: ServeKernelRequest) -> bool:
        """Accepts a frame from the application, for one of gRPC's threads. False: the stream is over."""
        try:
            await self._taken_in.send(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def hand_out(self) -> ServeKernelResponse | OperationError | None:
        """Waits for a frame to the application, for one of gRPC's threads. None: the stream is over."""
        try:
            return await self._handed_out.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            return None
