"""The live view of one caller: four watches of the API, shared by the browsers and logins with this view.

The watches resume by their tokens after an outage, and a snapshot replaces the view if a token is too old. No
snapshot has what began and ended before it. So browsers are told of such a gap, and ask for lists again.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias, final

import grpc
from leasehold.v1.command_service_pb2 import WatchCommandsRequest, WatchCommandsResponse
from leasehold.v1.event_service_pb2 import WatchEventsRequest, WatchEventsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetRequest, WatchFleetResponse
from leasehold.v1.workload_service_pb2 import WatchWorkloadsRequest, WatchWorkloadsResponse

from leasehold_web.documents import Document, document, gpu_row
from leasehold_web.entries import Api, Entry, LoginRefusedError
from leasehold_web.listeners import Listener
from leasehold_web.refusals import refusal

logger = logging.getLogger(__name__)

ENDED_LIMIT: Final = 256
"""Most ended workloads, ended commands and events that a view keeps. Lists have the others."""

RETRY_MIN_S: Final = 0.2
RETRY_MAX_S: Final = 2.0
LINGER_S: Final = 30.0
"""How long the watches go on without a browser, for one that connects again."""

_OVER: Final = {
    "workload": frozenset({"EXITED", "FAILED", "RELEASED"}),
    "command": frozenset({"SUCCEEDED", "FAILED", "REJECTED", "CANCELLED", "EXPIRED"}),
}

Change: TypeAlias = tuple[str, str, Document | None]
"""Kind and id of an entry, and the entry. None: it was deleted."""

Response: TypeAlias = (
    WatchFleetResponse | WatchWorkloadsResponse | WatchCommandsResponse | WatchEventsResponse
)
Opened: TypeAlias = AsyncIterable[Response]
Open: TypeAlias = Callable[[Api, str], Opened]
"""Opens a watch, given a resume token or an empty text."""


@final
class Feed:
    """The view of one caller, as long as browsers look at it. The watches use a login of one of them.

    Args:
        entry: The login of the first browser.
    """

    def __init__(self, entry: Entry) -> None:
        self._first = entry
        self._rows: dict[str, dict[str, Document]] = {
            kind: {} for kind in ("worker", "gpu", "workload", "command", "event")
        }
        self._listeners: dict[Listener, Entry] = {}
        """With the login of each."""
        self._lost: dict[str, Document] = {}
        """The error of each watch that has no answer, and since when."""
        self._loading = set(_WATCHES)
        """Watches whose first snapshot is not complete."""
        self._watching: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self.refused: Document | None = None
        """Why the caller may see nothing any more."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody listens and no watch is open."""
        return not self._listeners and (self._watching is None or self._watching.done())

    @property
    def rows(self) -> int:
        """Number of entries of the view."""
        return sum(map(len, self._rows.values()))

    @contextmanager
    def listening(self, entry: Entry) -> Iterator[Listener]:
        """A listener of a login. It gets the whole view, and then each change."""
        listener = Listener()
        for kind, rows in self._rows.items():
            for entry_id, row in rows.items():
                listener.put(kind, entry_id, row)
        listener.note("state", self._state())
        self._listeners[listener] = entry
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch_all())
        try:
            yield listener
        finally:
            del self._listeners[listener]
            if not self._listeners:
                self._idle = asyncio.get_running_loop().call_later(LINGER_S, self._end)

    async def stop(self) -> None:
        """Ends the watches and the listeners."""
        watching = self._watching
        self._end()
        for listener in self._listeners:
            listener.close()
        if watching is not None:
            await asyncio.gather(watching, return_exceptions=True)

    def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for rows in self._rows.values():
            rows.clear()
        self._loading = set(_WATCHES)

    async def _watch_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, (kinds, open_watch) in _WATCHES.items():
                    tasks.create_task(self._watch(name, kinds, open_watch))
        except ExceptionGroup:  # a defect: the page would look live and stand still
            logger.exception("the watches of a page have failed, and its browsers connect again")
            for listener in self._listeners:
                listener.close()

    async def _watch(self, name: str, kinds: tuple[str, ...], open_watch: Open) -> None:
        token, wait_s = "", RETRY_MIN_S
        while self.refused is None:
            seen: set[tuple[str, str]] | None = None if token else set()
            try:
                entry = next(iter(self._listeners.values()), self._first)
                api = await entry.api()
                async for response in open_watch(api, token):
                    if self._lost.pop(name, None) is not None:
                        self._tell()
                    wait_s = RETRY_MIN_S
                    token = response.resume_token or token
                    if seen is not None and response.bookmark.snapshot_end:
                        self._drop_unseen(kinds, seen)
                        seen = None
                        if name not in self._loading:
                            self._tell_gap()
                        self._loading.discard(name)
                        self._tell()
                    for change in _changes(response):
                        if seen is not None:
                            seen.add(change[:2])
                        self._apply(*change)
            except grpc.aio.UsageError:  # the login has ended, and with it its channel: another one goes on
                pass
            except asyncio.CancelledError:
                # A closed channel cancels its calls, such as after the renewal of a certificate.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            except LoginRefusedError as error:  # the credentials can't be read for now
                self._lose(name, {"reason": "", "message": str(error), "metadata": {}})
                self._tell()
            except grpc.aio.AioRpcError as error:
                found = refusal(error)
                if found["reason"] == "INVALID_TOKEN":
                    token = ""
                    self._drop_ended(kinds)  # the caller may see less of them now, and no snapshot has them
                    continue
                if found["reason"] == "UNAUTHENTICATED" and await entry.is_renewed(api):
                    continue  # the watch had the expired certificate
                # The text of an outage is gRPC's, and helps no user.
                is_away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                self._lose(name, {**found, "message": ""} if is_away and not found["reason"] else found)
                if found["reason"] in ("UNAUTHENTICATED", "NOT_PERMITTED"):
                    self._refuse(found)
                    return
                self._tell()
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    def _lose(self, name: str, why: Document) -> None:
        """Notes why a watch has no answer. The time of the first failure stays."""
        known = self._lost.get(name)
        self._lost[name] = {**why, "since": known["since"] if known is not None else time.time() * 1e3}

    def _refuse(self, why: Document) -> None:
        """Ends the streams, after a note that says why."""
        self.refused = why
        self._tell()
        for listener in self._listeners:
            listener.close()

    def _apply(self, kind: str, entry_id: str, row: Document | None) -> None:
        rows = self._rows[kind]
        if row is None:
            rows.pop(entry_id, None)  # a browser may list an ended entry that this view lacks
        else:
            rows.pop(entry_id, None)
            rows[entry_id] = row
            self._drop_oldest(kind)
        for listener in self._listeners:
            listener.put(kind, entry_id, row)

    def _drop_oldest(self, kind: str) -> None:
        """Keeps a bounded number of ended entries. Browsers keep their own."""
        over = _OVER.get(kind)
        rows = self._rows[kind]
        if kind == "event":
            if len(rows) > ENDED_LIMIT:
                del rows[next(iter(rows))]
        elif over is not None:
            latest = next(reversed(rows.values()))
            if _state_of(latest) in over:
                ended = [one for one, row in rows.items() if _state_of(row) in over]
                for one in ended[:-ENDED_LIMIT]:
                    del rows[one]

    def _drop_ended(self, kinds: tuple[str, ...]) -> None:
        """Forgets ended entries and events. Browsers keep their own."""
        for kind in kinds:
            over = _OVER.get(kind, frozenset())
            rows = self._rows[kind]
            for entry_id in [one for one, row in rows.items() if kind == "event" or _state_of(row) in over]:
                del rows[entry_id]

    def _drop_unseen(self, kinds: tuple[str, ...], seen: set[tuple[str, str]]) -> None:
        """Removes the entries that a snapshot lacks, except ended ones, which no snapshot has."""
        for kind in kinds:
            over = _OVER.get(kind, frozenset())
            for entry_id, row in list(self._rows[kind].items()):
                if (kind, entry_id) not in seen and _state_of(row) not in over and kind != "event":
                    self._apply(kind, entry_id, None)

    def _tell_gap(self) -> None:
        """Tells browsers that this snapshot replaces lost changes, so that they ask for what has ended."""
        for listener in self._listeners:
            listener.note("gap", {})

    def _tell(self) -> None:
        for listener in self._listeners:
            listener.note("state", self._state())

    def _state(self) -> Document:
        """Whether the view is current, complete, or why not."""
        state: Document = {"is_loading": bool(self._loading)}
        if self._lost:
            state["lost"] = next(iter(self._lost.values()))
        if self.refused is not None:
            state["refused"] = self.refused
        return state


def _state_of(row: Document) -> object:
    status = row.get("status")
    return status.get("state") if isinstance(status, dict) else row.get("state")


def _changes(response: Response) -> Iterator[Change]:
    """The change of a response, as an entry of the view. A bookmark has none."""
    match response.WhichOneof("change"), response:
        case "worker", WatchFleetResponse():
            yield "worker", response.worker.worker_id, document(response.worker)
        case "gpu", WatchFleetResponse():
            yield "gpu", response.gpu.gpu.uuid, gpu_row(response.gpu)
        case "deleted_worker_id", WatchFleetResponse():
            yield "worker", response.deleted_worker_id, None
        case "deleted_gpu_uuid", WatchFleetResponse():
            yield "gpu", response.deleted_gpu_uuid, None
        case "workload", WatchWorkloadsResponse():
            yield "workload", response.workload.workload_id, document(response.workload)
        case "deleted_workload_id", WatchWorkloadsResponse():
            yield "workload", response.deleted_workload_id, None
        case "command", WatchCommandsResponse():
            yield "command", response.command.command_id, document(response.command)
        case "deleted_command_id", WatchCommandsResponse():
            yield "command", response.deleted_command_id, None
        case "event", WatchEventsResponse():
            yield "event", response.event.event_id, document(response.event)


_WATCHES: Final[dict[str, tuple[tuple[str, ...], Open]]] = {
    "fleet": (
        ("worker", "gpu"),
        lambda api, token: api.fleet.WatchFleet(WatchFleetRequest(resume_token=token), metadata=api.metadata),
    ),
    "workloads": (
        ("workload",),
        lambda api, token: api.workloads.WatchWorkloads(
            WatchWorkloadsRequest(resume_token=token), metadata=api.metadata
        ),
    ),
    "commands": (
        ("command",),
        lambda api, token: api.commands.WatchCommands(
            WatchCommandsRequest(resume_token=token), metadata=api.metadata
        ),
    ),
    "events": (
        ("event",),
        lambda api, token: api.events.WatchEvents(
            WatchEventsRequest(resume_token=token), metadata=api.metadata
        ),
    ),
}
"""The kinds of entries of each watch, and how it is opened. A watch of events begins with a bookmark."""


@final
class Feeds:
    """The views in use, by what tells them apart."""

    def __init__(self) -> None:
        self._feeds: dict[object, Feed] = {}

    def of(self, entry: Entry) -> Feed:
        """The view of a caller, which callers with the same view share."""
        for view, feed in list(self._feeds.items()):
            if feed.is_idle or feed.refused is not None:
                del self._feeds[view]
        return self._feeds.setdefault(entry.view, Feed(entry))

    async def stop(self) -> None:
        """Ends all views."""
        await asyncio.gather(*(feed.stop() for feed in self._feeds.values()))
