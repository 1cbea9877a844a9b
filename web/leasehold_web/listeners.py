"""The changes that wait for one browser. A later change of an entry replaces an earlier one.

So the number of entries bounds the changes that wait, and a slow browser gets the newest states. Its stream
drops a browser that reads nothing for a while. The browser then connects again.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, TypeAlias, final

import msgspec

from leasehold_web.documents import Document

BATCH_LIMIT: Final = 1_000
"""Most entries of one message of the stream."""

GATHER_S: Final = 0.01
"""How long changes are gathered before they are sent together: a worker publishes its GPUs one by one."""

BEAT_S: Final = 10.0
"""Time between two messages while nothing changes, by which a browser notices a lost connection."""

Key: TypeAlias = tuple[str, str]
"""Kind and id of an entry."""


@final
class Listener:
    """The changes for one browser, until it is closed."""

    def __init__(self) -> None:
        self._pending: dict[Key, Document | None] = {}
        self._notes: dict[str, Document] = {"reset": {}}
        self._wake = asyncio.Event()
        self._is_closed = False

    def put(self, kind: str, entry_id: str, row: Document | None) -> None:
        """Adds the new state of an entry, unless the listener is closed. None: it was deleted."""
        if self._is_closed:
            return
        self._pending.pop((kind, entry_id), None)
        self._pending[kind, entry_id] = row
        self._wake.set()

    def note(self, name: str, value: Document) -> None:
        """Adds a message about the stream itself. A later one of the same name replaces an earlier one."""
        self._notes[name] = value
        self._wake.set()

    def close(self) -> None:
        """Ends :meth:`messages` after the notes. The changes that wait are dropped."""
        self._is_closed = True
        self._pending.clear()
        self._wake.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields the messages of the stream as JSON: notes, then entries as [kind, id, row]."""
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                yield b"{}"
                continue
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            if (reset := self._notes.pop("reset", None)) is not None:
                yield msgspec.json.encode({"reset": reset})
            while self._pending:
                keys = list(self._pending)[:BATCH_LIMIT]
                yield msgspec.json.encode(
                    {"changes": [(kind, one, self._pending.pop((kind, one))) for kind, one in keys]}
                )
                await asyncio.sleep(0)  # others have their turn while a large fleet is encoded
            notes, self._notes = self._notes, {}
            if notes:
                yield msgspec.json.encode(notes)
            if self._is_closed and not self._notes:
                return
