"""Who calls: the host of a call's peer, and how many calls it has under way.

There are no identities yet, so callers are told apart by their host. A host has at most as much as is still
free, which always leaves room for others.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError

CALL_LIMIT: Final = 1_024
"""Calls of clients under way at once."""

LIST_LIMIT: Final = 64
"""Lists of clients under way at once. Each takes 10 MB until its client has read the page."""

STREAM_LIMIT: Final = 1_024
"""Watches and follows of clients at once."""

SESSION_LIMIT: Final = 24_576
"""Streams of workers at once, also those that have ended and whose peer does not read the rest."""

_CALLER: Final[ContextVar[str]] = ContextVar("caller", default="")


def caller() -> str:
    """The host whose call the running task serves. Empty: no call."""
    return _CALLER.get()


def note_caller(peer: str) -> None:
    """Names the caller to what runs in this task from now on, and in tasks that it starts."""
    _CALLER.set(host_of(peer))


def host_of(peer: str) -> str:
    """The host in a peer as gRPC writes it, such as ``ipv4:127.0.0.1:7400``."""
    return peer.rpartition(":")[0]


@final
class CallLimits:
    """The calls of one kind that are under way.

    Args:
        limit: How many there may be. A host has at most as many as are still free.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def enter(self, peer: str) -> Callable[[], None]:
        """Counts a call, and returns what ends that.

        Raises:
            FleetError: TOO_MANY_CALLS.
        """
        host = host_of(peer)
        if self._counts[host] >= self._limit - self._counts.total():
            raise FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
                f"{self._counts[host]} calls of {host} are under way, of at most {self._limit} of all hosts: "
                "end some of them, or try again later",
            )
        self._counts[host] += 1

        def leave() -> None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]

        return leave

    @contextmanager
    def entered(self, peer: str) -> Iterator[None]:
        """Counts a call within the context.

        Raises:
            FleetError: TOO_MANY_CALLS.
        """
        leave = self.enter(peer)
        try:
            yield
        finally:
            leave()
