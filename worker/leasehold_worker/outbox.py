"""Frames on their way up: the one queue between trio and gRPC's sending thread.

Loads never queue: a newer one takes the place of an unsent one. Everything else is kept in order.
"""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final, final

from leasehold.v1.worker_session_pb2 import ConnectRequest

FRAME_LIMIT: Final = 256
"""Frames that may wait. More means that the coordinator doesn't read: the session is given up."""


class OutboxFullError(Exception):
    """The coordinator does not read."""


@final
class Outbox:
    """An iterator of frames for gRPC, which never raises and ends after :meth:`close`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._frames: deque[ConnectRequest] = deque()
        self._load: ConnectRequest | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many frames wait."""
        with self._condition:
            return len(self._frames)

    def put(self, frame: ConnectRequest) -> None:
        """Adds a frame that must not be lost. Nothing is added once the box is closed.

        Raises:
            OutboxFullError: Too many wait.
        """
        with self._condition:
            if self._closed:
                return
            if len(self._frames) >= FRAME_LIMIT:
                raise OutboxFullError(f"{FRAME_LIMIT} frames wait: the coordinator does not read")
            self._frames.append(frame)
            self._condition.notify()

    def put_load(self, frame: ConnectRequest) -> None:
        """Adds a load, in the place of one that has not been sent."""
        with self._condition:
            if not self._closed:
                self._load = frame
                self._condition.notify()

    def close(self) -> None:
        """Lets what waits be sent, and then ends the iterator."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def __iter__(self) -> Iterator[ConnectRequest]:
        return self

    def __next__(self) -> ConnectRequest:
        with self._condition:
            self._condition.wait_for(lambda: self._frames or self._load is not None or self._closed)
            if self._frames:
                return self._frames.popleft()
            if self._load is not None:
                load, self._load = self._load, None
                return load
            raise StopIteration
