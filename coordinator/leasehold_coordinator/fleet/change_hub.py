"""Publishes changes to watchers: each change once, in order, with a revision to resume from."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

from google.protobuf import message
from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError

HISTORY_LIMIT: Final = 2_000
"""Most changes kept for a resume. They are kept serialized, since a message takes five times the memory."""

HISTORY_BYTES: Final = 2 * 2**20
"""Most serialized bytes of changes kept for a resume."""

BACKLOG_LIMIT: Final = 1_000
"""Most changes that may wait for one watcher. A slower watcher must start again from a snapshot."""

BACKLOG_BYTES: Final = 8 * 2**20
"""Serialized bytes of waiting changes from which on a watcher counts as too slow."""

START_OVER_INTERVAL_S: Final = 5.0
"""Least time between two ends of all watches. A worker could change its GPUs a hundred times per second."""

BOOKMARK_INTERVAL_S: Final = 15.0

REVISION_DIGITS: Final = 19
"""Most digits of a revision, which has 64 bits."""

Message = TypeVar("Message", bound=message.Message)


@dataclass(frozen=True, slots=True)
class Change(Generic[Message]):
    """The new state of a thing, with the revision of the change and the serialized size."""

    revision: int
    key: str
    message: Message
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Message]):
    """A serialized change, kept for a resume."""

    revision: int
    key: str
    kind: type[Message]
    record: bytes


@final
class Subscription(Generic[Message]):
    """The changes that a watcher has not read yet."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self._queue: asyncio.Queue[Change[Message] | None] = asyncio.Queue(BACKLOG_LIMIT + 1)
        """The waiting changes, then None after the end."""
        self._waiting_bytes = 0
        self._why_ended = ""

    def offer(self, change: Change[Message]) -> None:
        """Adds a change. A full subscription ends, and skips this change and all later ones."""
        if self._queue.qsize() >= BACKLOG_LIMIT:
            self.end(f"the watcher fell {BACKLOG_LIMIT} changes behind")
        elif self._waiting_bytes >= BACKLOG_BYTES:
            self.end(f"the watcher fell {BACKLOG_BYTES} bytes behind")
        elif not self._why_ended:
            self._waiting_bytes += change.size_bytes
            self._queue.put_nowait(change)

    def end(self, why: str) -> None:
        """Ends the subscription after the waiting changes. A second call has no effect."""
        if not self._why_ended:
            self._why_ended = why
            self._queue.put_nowait(None)

    async def changes(self) -> AsyncIterator[Change[Message] | None]:
        """Every change, and None after each BOOKMARK_INTERVAL_S without a change.

        Raises:
            FleetError: INVALID_TOKEN, the watcher was too slow, or must start again from a snapshot.
        """
        while True:
            change: Change[Message] | None = None
            is_quiet = False
            try:
                async with asyncio.timeout(BOOKMARK_INTERVAL_S):
                    change = await self._queue.get()
            except TimeoutError:
                is_quiet = True
            if change is None and not is_quiet:
                raise FleetError(
                    errors_pb2.ERROR_REASON_INVALID_TOKEN,
                    f"{self._why_ended}: watch again, from a snapshot",
                    field="resume_token",
                )
            if change is not None:
                self._waiting_bytes -= change.size_bytes
            yield change  # outside the timeout, which must not limit the watcher's own work


@final
class Hub(Generic[Message]):
    """Publishes the changes of one kind of thing.

    Args:
        history_bytes: Most serialized bytes of changes kept for a resume.
    """

    def __init__(self, history_bytes: int = HISTORY_BYTES) -> None:
        self._instance = uuid.uuid4().hex[:8]
        self._history_bytes = history_bytes
        self._history: deque[_Kept[Message]] = deque()
        self._kept_bytes = 0
        self._subscriptions: set[Subscription[Message]] = set()
        self._started_over_s = -START_OVER_INTERVAL_S
        """When all watches were last ended, by the monotonic clock."""
        self._why_again = ""
        """Why all watches must end at a later tick. Empty: they need not end."""
        self.revision = 0
        """Revision of the newest change."""

    def publish(self, key: str, message: Message) -> None:
        """Publishes a change to the watchers of everything and of this key."""
        self.revision += 1
        record = message.SerializeToString()
        change = Change(self.revision, key, message, len(record))
        self._history.append(_Kept(self.revision, key, type(message), record))
        self._kept_bytes += len(record)
        while self._kept_bytes > self._history_bytes or len(self._history) > HISTORY_LIMIT:
            self._kept_bytes -= len(self._history.popleft().record)
        for subscription in self._subscriptions:
            if subscription.key in (None, key):
                subscription.offer(change)

    def start_over(self, why: str) -> None:
        """Ends every watch and makes resume tokens invalid, since a change can't express a removal.

        Within 5 s of the last call, :meth:`tick` ends the watches later.
        """
        if time.monotonic() - self._started_over_s < START_OVER_INTERVAL_S:
            self._why_again = why
            return
        self._started_over_s, self._why_again = time.monotonic(), ""
        self._instance = uuid.uuid4().hex[:8]
        self._history.clear()
        self._kept_bytes = 0
        for subscription in self._subscriptions:
            subscription.end(why)

    def tick(self) -> None:
        """Ends every watch if a call of :meth:`start_over` was delayed."""
        if self._why_again:
            self.start_over(self._why_again)

    @contextmanager
    def subscribe(self, key: str | None = None) -> Iterator[Subscription[Message]]:
        """Subscribes to all changes, or to those of one key."""
        subscription: Subscription[Message] = Subscription(key)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def token(self, revision: int) -> str:
        """The resume token for the changes after a revision."""
        return f"{self._instance}.{revision}"

    def since(self, token: str) -> list[Change[Message]]:
        """The changes after a token.

        Raises:
            FleetError: INVALID_TOKEN, the token is too old or of another run of the coordinator.
        """
        instance, _, digits = token.partition(".")
        known = instance == self._instance and digits.isdecimal() and len(digits) <= REVISION_DIGITS
        revision = int(digits) if known else -1
        oldest = self._history[0].revision if self._history else self.revision + 1
        if not oldest <= revision + 1 <= self.revision + 1:
            raise FleetError(
                errors_pb2.ERROR_REASON_INVALID_TOKEN,
                f"the resume token {token!r} is unknown or too old: watch again, from a snapshot",
                field="resume_token",
            )
        return [
            Change(kept.revision, kept.key, kept.kind.FromString(kept.record), len(kept.record))
            for kept in self._history
            if kept.revision > revision
        ]
