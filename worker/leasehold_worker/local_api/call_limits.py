"""Limits of concurrent calls of a host's processes: shared among users, partly reserved for root."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer


@final
class CallLimits:
    """Limits calls. A user gets half at most; an eighth is kept for root and the worker's user.

    Args:
        limit: Number of calls.
        noun: Name of the calls, for refusals.
    """

    def __init__(self, limit: int, noun: str) -> None:
        self._limit = limit
        self._noun = noun
        self._lock = threading.Lock()
        self._taken = 0
        self._by_user = Counter[int]()
        """Calls by user, without root and the worker's user."""

    @contextmanager
    def taken(self, peer: Peer) -> Iterator[None]:
        """Counts a call while the context lasts.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES: the limit is reached for this user.
        """
        with self._lock:
            self._require(peer)
            self._taken += 1
            if not peer.is_trusted:
                self._by_user[peer.uid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken -= 1
                if not peer.is_trusted:
                    self._by_user[peer.uid] -= 1
                    self._by_user += Counter()  # drops users with a count of 0

    def _require(self, peer: Peer) -> None:
        if self._taken >= self._limit:
            raise self._full(f"{self._limit} {self._noun} are open, the limit of a worker")
        if peer.is_trusted:
            return
        if self._by_user.total() >= (most := self._limit - self._limit // 8):
            raise self._full(f"{most} {self._noun} are open, the limit of a worker for users")
        if self._by_user[peer.uid] >= (most := self._limit // 2):
            raise self._full(f"user {peer.user} has {most} {self._noun} open, the limit of a user")

    def _full(self, why: str) -> OperationError:
        return OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES, f"{why}: wait until one of them ends"
        )
