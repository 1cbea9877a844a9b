"""The worker's news to the coordinator: one sink for all sessions."""

from typing import final

import trio
from leasehold.worker.v1.session_pb2 import ConnectRequest

from leasehold_worker.session.outbox import Outbox, OutboxFullError


@final
class FrameSink:
    """Puts frames into the outbox of the current session.

    Without a session a frame is dropped: the next hello has the whole state.
    """

    def __init__(self) -> None:
        self._overflow = trio.Event()
        self.outbox: Outbox | None = None
        """The outbox of the current session. None: there is no session."""

    def open(self) -> Outbox:
        """Begins a session."""
        self.outbox, self._overflow = Outbox(), trio.Event()
        return self.outbox

    def close(self) -> None:
        """Ends the session."""
        self.outbox = None

    def send(self, frame: ConnectRequest) -> None:
        """Sends a frame. With too many waiting frames, the session ends."""
        if self.outbox is None:
            return
        try:
            self.outbox.put(frame)
        except OutboxFullError:
            self.outbox.close()
            self.outbox = None
            self._overflow.set()

    async def wait_overflow(self) -> None:
        """Waits until too many frames wait."""
        await self._overflow.wait()
