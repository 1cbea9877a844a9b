"""The caller of each call, and limits on concurrent calls.

A client counts by its identity, and a worker by its host. A caller may have at most as many calls as
are still free, which always leaves room for other callers.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, final

from google.protobuf.message import Message
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.errors import FleetError

CALL_LIMIT: Final = 1_024
"""Most concurrent unary calls of clients."""

LIST_LIMIT: Final = 64
"""Most concurrent lists of clients. A list takes 10 MB until its client has read the page."""

STREAM_LIMIT: Final = 1_024
"""Most concurrent response streams of clients, such as watches."""

SESSION_LIMIT: Final = 24_576
"""Most concurrent streams of workers, with ended streams whose peer has not read the last frames."""

_REQUEST: Final[ContextVar[tuple[str, Message] | None]] = ContextVar("request", default=None)
"""Method and request of the call that the current task serves."""

_CALLER: Final[ContextVar[Caller | None]] = ContextVar("caller", default=None)


def current_caller() -> Caller | None:
    """The caller whose call the current task serves. None: no call, so Leasehold itself acts."""
    return _CALLER.get()


def require_caller() -> Caller:
    """The caller whose call the current task serves. Only for tasks that serve a call."""
    found = _CALLER.get()
    if found is None:
        raise LookupError("the task serves no call")
    return found


def caller() -> str:
    """The identity whose call the current task serves. Empty: no call."""
    found = _CALLER.get()
    return str(found.identity) if found is not None else ""


def owner() -> str:
    """The identity that owns what the current task creates. Empty: no call."""
    found = _CALLER.get()
    return str(found.owner) if found is not None else ""


def on_behalf_of() -> str:
    """The user for whom the caller of the current task acts. Empty: none."""
    found = _CALLER.get()
    return str(found.on_behalf_of or "") if found is not None else ""


def counted_caller() -> str:
    """What the limits on concurrent calls count by: an identity, on whatever hosts it calls.

    The coordinator's own user counts by host, since without TLS its token is used on many hosts.
    """
    found = _CALLER.get()
    if found is None:
        return ""
    return f"{found.identity} at {found.address}" if found.is_local_admin else str(found.identity)


def note_caller(found: Caller) -> None:
    """Sets the caller of the current task, and of tasks that it starts later."""
    _CALLER.set(found)


def current_request() -> tuple[str, Message] | None:
    """Full name of the method and request of the call that the current task serves. None: no call."""
    return _REQUEST.get()


def note_request(method: str, request: Message) -> None:
    """Sets the request of the current task, and of tasks that it starts later."""
    _REQUEST.set((method, request))


def host_of(peer: str) -> str:
    """The host in a peer as gRPC writes it, such as ``ipv4:127.0.0.1:7400``."""
    return peer.rpartition(":")[0]


@final
class CallLimits:
    """The calls of one kind under way.

    Args:
        limit: Most calls of all callers. One caller may have at most as many as are still free.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def enter(self, caller: str) -> Callable[[], None]:
        """Counts a call. The returned function ends the count.

        Raises:
            FleetError: TOO_MANY_CALLS.
        """
        if self._counts[caller] >= self._limit - self._counts.total():
            raise FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
                f"{self._counts[caller]} calls of {caller} are under way, of at most {self._limit} in all: "
                "end some of them, or try again later",
            )
        self._counts[caller] += 1

        def leave() -> None:
            self._counts[caller] -= 1
            if not self._counts[caller]:
                del self._counts[caller]

        return leave

    @contextmanager
    def entered(self, caller: str) -> Iterator[None]:
        """Counts a call within the context.

        Raises:
            FleetError: TOO_MANY_CALLS.
        """
        leave = self.enter(caller)
        try:
            yield
        finally:
            leave()
