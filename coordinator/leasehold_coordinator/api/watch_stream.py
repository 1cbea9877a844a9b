"""The responses of a watch: a snapshot, then changes and deletions, with bookmarks and resume tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TypeVar

from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.event_service_pb2 import WatchEventsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.watch_pb2 import Bookmark
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse

from leasehold_coordinator.fleet import change_hub
from leasehold_coordinator.fleet.change_hub import Hub

Response = TypeVar(
    "Response", WatchFleetResponse, WatchWorkloadsResponse, WatchCommandsResponse, WatchEventsResponse
)


async def watch(
    hub: Hub[Response],
    kind: type[Response],
    resume_token: str,
    snapshot: Iterable[Sequence[tuple[str, Response]]] = (),
    *,
    key: str | None = None,
    wants: Callable[[Response], bool] | None = None,
    passes: Callable[[Response], bool] = lambda _: True,
    scope: str = "",
    view: Callable[[Response], Response] = lambda response: response,
    shown: Callable[[Response], Response] = lambda response: response,
) -> AsyncGenerator[Response]:
    """Yields the responses of a watch, until the watcher leaves or is too slow.

    An entry of the snapshot is read when the watcher has taken the entries before it. Waiting changes of this
    entry are then dropped, since they are older. The end of the snapshot follows all other waiting changes,
    and carries the first token.

    Args:
        hub: The changes.
        kind: The type of the responses.
        resume_token: The changes after this token. Empty: a snapshot first.
        snapshot: The entries with their keys, some at a time. Each item is built when it is asked for.
        key: Only changes of this key. None: of all keys.
        wants: Whether a response is for this watcher. None: each is. It runs in the turn of the publisher,
            once for each watcher, so it must be cheap.
        passes: Whether a wanted response passes the filter. It runs in the turn of the watcher.
        scope: Distinguishes the tokens of different views.
        view: The part of a response that this watcher may see.
        shown: The view as this watcher gets it: itself, or the deletion of an entry that does not match.

    Raises:
        FleetError: INVALID_TOKEN, the token is of another coordinator or too old, or the watcher is too slow.
    """
    with hub.subscribe(key, wants) as subscription:
        if resume_token:
            for change in hub.since(resume_token, scope):
                if not (subscription.is_for_watcher(change) and passes(change.message)):
                    await asyncio.sleep(0)
                else:
                    yield _with_token(kind, shown(view(change.message)), hub.token(change.revision, scope))
        else:
            for entries in snapshot:
                for entry_key, _ in entries:
                    subscription.drop(entry_key)
                for _, response in entries:
                    seen = view(response)
                    if shown(seen) is seen:
                        yield seen
                await asyncio.sleep(0)  # a filter may match no entry, and the fleet may be large
            complete = hub.revision
            for change in subscription.until(complete):
                if passes(change.message):
                    yield shown(view(change.message))
            yield kind(bookmark=Bookmark(snapshot_end=True), resume_token=hub.token(complete, scope))
        told_s = time.monotonic()
        async for next_change in subscription.changes():
            if next_change is None:  # no change waits, so all up to now were delivered
                yield kind(bookmark=Bookmark(), resume_token=hub.token(hub.revision, scope))
            elif passes(next_change.message):
                seen = shown(view(next_change.message))
                yield _with_token(kind, seen, hub.token(next_change.revision, scope))
            else:
                await asyncio.sleep(0)  # a thousand changes may wait, and none may pass
                if time.monotonic() - told_s < change_hub.BOOKMARK_INTERVAL_S:
                    continue
                yield kind(bookmark=Bookmark(), resume_token=hub.token(next_change.revision, scope))
            told_s = time.monotonic()


def _with_token(kind: type[Response], shared: Response, token: str) -> Response:
    """A copy of a response that watchers share, with a token."""
    response = kind()
    response.CopyFrom(shared)
    response.resume_token = token
    return response
