"""The queue of outgoing frames between trio and gRPC's sending thread.

News (hello, updates of commands and workloads, goodbye) keep their order and go first. Loads never queue: a
newer one replaces an unsent one. Answers go last, so that readers of output can't block the rest.
"""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final, final

from leasehold.worker.v1.session_pb2 import ConnectRequest

FRAME_LIMIT: Final = 256
"""News that may wait. More means that the coordinator doesn't read: the session ends."""

ANSWER_LIMIT: Final = 16
"""Answers that may wait before the next question is answered. The largest have 64 KiB."""


class OutboxFullError(Exception):
    """The coordinator does not read."""


@final
class Outbox:
    """An iterator of frames for gRPC, which never raises and ends after :meth:`close`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._frames: deque[ConnectRequest] = deque()
        self._answers: deque[ConnectRequest] = deque()
        self._load: ConnectRequest | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of waiting frames, without answers."""
        with self._condition:
            return len(self._frames)

    @property
    def has_room(self) -> bool:
        """Whether another question may be answered."""
        with self._condition:
            return len(self._answers) < ANSWER_LIMIT

    def put(self, frame: ConnectRequest) -> None:
        """Adds a frame that must not be lost. A closed outbox ignores it.

        Raises:
            OutboxFullError: Too many frames wait.
        """
        with self._condition:
            if self._closed:
                return
            if len(self._frames) >= FRAME_LIMIT:
                raise OutboxFullError(f"{FRAME_LIMIT} frames wait: the coordinator does not read")
            self._frames.append(frame)
            self._condition.notify()

    def put_answer(self, frame: ConnectRequest) -> None:
        """Adds an answer, which is sent once nothing else waits. Wait for ``has_room`` first."""
        with self._condition:
            if not self._closed:
                self._answers.append(frame)
                self._condition.notify()

    def put_load(self, frame: ConnectRequest) -> None:
        """Adds a load, in place of an unsent one."""
        with self._condition:
            if not self._closed:
                self._load = frame
                self._condition.notify()

    def close(self) -> None:
        """Sends the waiting news and load, drops the answers, and then ends the iterator."""
        with self._condition:
            self._closed = True
            self._answers.clear()
            self._condition.notify()

    def __iter__(self) -> Iterator[ConnectRequest]:
        return self

    def __next__(self) -> ConnectRequest:
        with self._condition:
            self._condition.wait_for(self._is_ready)
            if self._frames:
                return self._frames.popleft()
            if self._load is not None:
                load, self._load = self._load, None
                return load
            if self._answers:
                return self._answers.popleft()
            raise StopIteration

    def _is_ready(self) -> bool:
        return bool(self._frames or self._answers) or self._load is not None or self._closed
