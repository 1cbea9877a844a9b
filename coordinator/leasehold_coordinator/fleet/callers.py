"""The caller of each call, and limits on concurrent calls.

There is no authentication yet, so callers are told apart by their host. A host may have at most as many calls
as are still free, which always leaves room for other hosts.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError

CALL_LIMIT: Final = 1_024
"""Most concurrent unary calls of clients."""

LIST_LIMIT: Final = 64
"""Most concurrent lists of clients. A list takes 10 MB until its client has read the page."""

STREAM_LIMIT: Final = 1_024
"""Most concurrent response streams of clients, such as watches."""

SESSION_LIMIT: Final = 24_576
"""Most concurrent streams of workers, with ended streams whose peer has not read the last frames."""

_CALLER: Final[ContextVar[str]] = ContextVar("caller", default="")


def caller() -> str:
    """The host whose call the current task serves. Empty: no call."""
    return _CALLER.get()


def note_caller(peer: str) -> None:
    """Sets the caller of the current task, and of tasks that it starts later."""
    _CALLER.set(host_of(peer))


def host_of(peer: str) -> str:
    """The host in a peer as gRPC writes it, such as ``ipv4:127.0.0.1:7400``."""
    return peer.rpartition(":")[0]


@final
class CallLimits:
    """The calls of one kind under way.

    Args:
        limit: Most calls of all hosts. One host may have at most as many as are still free.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def enter(self, peer: str) -> Callable[[], None]:
        """Counts a call. The returned function ends the count.

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
