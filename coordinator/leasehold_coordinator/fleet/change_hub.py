"""Changes for watchers: each once, in order, with a revision to resume from.

A message is published in the turn of the loop in which its state became true. Therefore a message of a later
revision is never older than one of an earlier revision, nor than a state that was read between the two.
"""

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
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
    """The changes that a watcher has not read yet.

    Args:
        key: Only changes of this key. None: of all keys.
        wants: Whether a change is for this watcher. None: each is.
    """

    def __init__(self, key: str | None, wants: Callable[[Message], bool] | None = None) -> None:
        self.key = key
        self._wants = wants
        self._waiting: deque[Change[Message]] = deque()
        self._waiting_keys: Counter[str] = Counter()
        self._waiting_bytes = 0
        self._woken = asyncio.Event()
        self._why_ended = ""

    def is_for_watcher(self, change: Change[Message]) -> bool:
        """Whether the watcher asked for changes like this one."""
        return self.key in (None, change.key) and (self._wants is None or self._wants(change.message))

    def offer(self, change: Change[Message]) -> None:
        """Adds a change. A full subscription ends, and no change after the gap is delivered."""
        if self._why_ended or not self.is_for_watcher(change):
            return
        if len(self._waiting) >= BACKLOG_LIMIT:
            self._end(f"the watcher fell {BACKLOG_LIMIT} changes behind")
        elif self._waiting_bytes >= BACKLOG_BYTES:
            self._end(f"the watcher fell {BACKLOG_BYTES} bytes behind")
        else:
            self._waiting.append(change)
            self._waiting_keys[change.key] += 1
            self._waiting_bytes += change.size_bytes
            self._woken.set()

    def _end(self, why: str) -> None:
        self._why_ended = why
        self._woken.set()

    def drop(self, key: str) -> None:
        """Drops the waiting changes of a key whose newest state is delivered instead."""
        if key not in self._waiting_keys:
            return
        kept = [change for change in self._waiting if change.key != key]
        self._waiting_bytes -= sum(change.size_bytes for change in self._waiting if change.key == key)
        self._waiting = deque(kept)
        del self._waiting_keys[key]

    def until(self, revision: int) -> Iterator[Change[Message]]:
        """The waiting changes up to this revision.

        Raises:
            FleetError: INVALID_TOKEN, the watcher was too slow, and a change up to this revision was dropped.
        """
        if self._why_ended:
            raise self._too_slow()
        return self._taken_until(revision)

    def _taken_until(self, revision: int) -> Iterator[Change[Message]]:
        while self._waiting and self._waiting[0].revision <= revision:
            yield self._take()

    def _take(self) -> Change[Message]:
        change = self._waiting.popleft()
        self._waiting_bytes -= change.size_bytes
        self._waiting_keys[change.key] -= 1
        if not self._waiting_keys[change.key]:
            del self._waiting_keys[change.key]
        return change

    async def changes(self) -> AsyncIterator[Change[Message] | None]:
        """Every change; None each time that nothing has changed for 15 s.

        Raises:
            FleetError: INVALID_TOKEN, the watcher was too slow.
        """
        while True:
            if self._waiting:
                yield self._take()
            elif self._why_ended:
                raise self._too_slow()
            else:
                self._woken.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(BOOKMARK_INTERVAL_S):
                        await self._woken.wait()
                if not self._woken.is_set():  # a change may come in the turn in which the time is over
                    yield None  # outside the timeout, which does not limit the watcher

    def _too_slow(self) -> FleetError:
        return FleetError(
            errors_pb2.ERROR_REASON_INVALID_TOKEN,
            f"{self._why_ended}: watch again, from a snapshot",
            field="resume_token",
        )


@final
class Hub(Generic[Message]):
    """Publishes the changes and deletions of one kind of thing, as responses of its watch without a token.

    Args:
        history_bytes: Most serialized bytes of changes kept for a resume.
    """

    def __init__(self, history_bytes: int = HISTORY_BYTES) -> None:
        self._instance = uuid.uuid4().hex[:8]
        self._history_bytes = history_bytes
        self._history: deque[_Kept[Message]] = deque()
        self._kept_bytes = 0
        self._subscriptions: set[Subscription[Message]] = set()
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
            if subscription.key in (None, key):  # asked here too: a thousand may watch one command each
                subscription.offer(change)

    @contextmanager
    def subscribe(
        self, key: str | None = None, wants: Callable[[Message], bool] | None = None
    ) -> Iterator[Subscription[Message]]:
        """Subscribes to all changes, to the changes of one key, or to wanted changes."""
        subscription: Subscription[Message] = Subscription(key, wants)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def has_changed(self, key: str, revision: int) -> bool:
        """Whether a key has, or may have, a change after a revision."""
        return self._oldest > revision + 1 or any(
            kept.key == key for kept in self._history if kept.revision > revision
        )

    def token(self, revision: int, scope: str = "") -> str:
        """The resume token for the changes after a revision, for one view of them."""
        return f"{self._instance}{scope}.{revision}"

    def since(self, token: str, scope: str = "") -> Iterator[Change[Message]]:
        """The changes after a token, up to now. Each is read when it is its turn: hundreds may read none.

        Raises:
            FleetError: INVALID_TOKEN, the token is too old, of another run of the coordinator, or of another
                view. The iterator raises it too, once it is so slow that its next change is no longer kept.
        """
        instance, _, digits = token.partition(".")
        known = instance == self._instance + scope and digits.isdecimal() and len(digits) <= REVISION_DIGITS
        revision = int(digits) if known else -1
        if not self._oldest <= revision + 1 <= self.revision + 1:
            raise _too_old(token)
        return self._replay(revision, self.revision)

    def _replay(self, revision: int, newest: int) -> Iterator[Change[Message]]:
        while revision < newest:
            revision += 1
            if revision < self._oldest:
                raise _too_old(self.token(revision - 1))
            kept = self._history[revision - self._oldest]
            yield Change(kept.revision, kept.key, kept.kind.FromString(kept.record), len(kept.record))

    @property
    def _oldest(self) -> int:
        """Revision of the oldest change that is kept. Revisions have no gaps."""
        return self._history[0].revision if self._history else self.revision + 1


def _too_old(token: str) -> FleetError:
    return FleetError(
        errors_pb2.ERROR_REASON_INVALID_TOKEN,
        f"the resume token {token[:64]!r} is unknown or too old: watch again, from a snapshot",
        field="resume_token",
    )
