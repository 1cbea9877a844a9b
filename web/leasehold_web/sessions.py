"""The sessions of browsers: a random id in a cookie, a caller, and an end.

The file with the sessions has digests of the ids, so its reader can't use them.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import msgspec

from leasehold_web.entries import Doors, Entry, LoginRefusedError

logger = logging.getLogger(__name__)

SESSION_LIMIT: Final = 256
"""Most sessions. A further login ends another session of its caller, or else the one used longest ago."""

SESSIONS_PER_CALLER: Final = 32
"""Most sessions of one caller, likewise. The logins of one caller end at most one session of others."""

SESSION_LIFE_S: Final = 12 * 3600.0
ID_BYTES: Final = 32
FILE_LIMIT_BYTES: Final = 4_000_000


class _Kept(msgspec.Struct, frozen=True):
    """A session in the file. Its expiry is in seconds of the Unix epoch."""

    digest: str
    kept: bytes
    expire_s: float
    caller: str = ""


@final
@dataclass(slots=True, eq=False)
class Session:
    """A session.

    Attributes:
        digest: SHA-256 of its id.
        entry: The login.
        expire_s: Its end, in seconds of the Unix epoch.
        calls: Number of calls under way.
        streams: Number of open streams.
    """

    digest: str
    entry: Entry
    expire_s: float
    calls: int = 0
    streams: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@final
class Sessions:
    """The sessions, by digest of their ids, the one that was used longest ago first.

    Args:
        doors: The logins.
        path: The file that keeps the sessions over a restart. None: they end with the process.
        replace_file: Replaces a file, readable by its owner only. Blocks.
    """

    def __init__(
        self,
        doors: Doors,
        path: Path | None = None,
        replace_file: Callable[[Path, bytes], None] | None = None,
    ) -> None:
        self._doors = doors
        self._path = path
        self._replace_file = replace_file
        self._live: dict[str, Session] = {}
        self._earlier: dict[str, _Kept] = {}
        """Sessions of an earlier run that have not been used since."""
        self._writing = asyncio.Lock()
        self._unfinished: set[asyncio.Task[None]] = set()
        """Ends of sessions and writes of the file."""

    async def load(self) -> None:
        """Reads the sessions of an earlier run. A file that can't be read counts as empty."""
        if self._path is None:
            return
        with suppress(FileNotFoundError):
            try:
                data = await asyncio.to_thread(_read, self._path)
                found = msgspec.json.decode(data, type=list[_Kept])
            except FileNotFoundError:
                raise
            except (OSError, ValueError) as error:
                logger.warning("%s can't be read, so browsers must log in again: %s", self._path, error)
                return
            now_s = time.time()
            self._earlier = {
                one.digest: one
                for one in found[-SESSION_LIMIT:]
                if now_s < one.expire_s <= now_s + SESSION_LIFE_S
            }

    async def open(self, entry: Entry) -> str:
        """Begins a session, and returns its id for the cookie."""
        session_id = secrets.token_urlsafe(ID_BYTES)
        session = Session(_digest(session_id), entry, time.time() + SESSION_LIFE_S)
        self._live[session.digest] = session
        await self._bound(session)
        await self._finish(self._save())  # a write that is cancelled could replace a later one
        return session_id

    async def find(self, session_id: str) -> Session | None:
        """The session with this id. None: there is none, or it is over."""
        if len(session_id) > 2 * ID_BYTES:
            return None
        digest = _digest(session_id)
        session = self._live.pop(digest, None)
        earlier = self._earlier.pop(digest, None) if session is None else None
        if earlier is not None and time.time() < earlier.expire_s:
            try:
                session = Session(digest, await self._doors.again(earlier.kept), earlier.expire_s)
            except LoginRefusedError:
                return None
        if session is None:
            return None
        self._live[digest] = session  # the last one now
        if time.time() >= session.expire_s:
            await self.close(session)
            return None
        if earlier is not None:
            await self._bound(session)
        return session

    async def _bound(self, latest: Session) -> None:
        """Ends sessions that were used longest ago, if there are too many with a new one.

        Sessions of the same caller come first, so that many logins end no sessions of others.
        """
        while (own := self._others_of(latest)) and (
            len(own) >= SESSIONS_PER_CALLER or self._count > SESSION_LIMIT
        ):
            await self._end_one(own[0])
        while self._count > SESSION_LIMIT:
            await self._end_one(next(iter([*self._earlier, *self._live])))

    def _others_of(self, session: Session) -> list[str]:
        """Digests of the other sessions of a session's caller, the one that was used longest ago first."""
        caller = session.entry.caller
        earlier = [one.digest for one in self._earlier.values() if one.caller == caller]
        live = [one.digest for one in self._live.values() if one.entry.caller == caller]
        return [*earlier, *(digest for digest in live if digest != session.digest)]

    @property
    def _count(self) -> int:
        return len(self._live) + len(self._earlier)

    async def _end_one(self, digest: str) -> None:
        if self._earlier.pop(digest, None) is None:
            await self.close(self._live[digest])

    async def close(self, session: Session) -> None:
        """Ends a session, and its streams.

        The end goes on if this is cancelled, such as by a browser that leaves during its logout.
        """
        if self._live.pop(session.digest, None) is not None:
            session.ended.set()
            await self._finish(self._end(session))

    async def _end(self, session: Session) -> None:
        await session.entry.leave()
        await self._save()

    async def _finish(self, work: Coroutine[None, None, None]) -> None:
        """Waits for work that goes on if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        await asyncio.shield(task)

    async def stop(self) -> None:
        """Ends all streams. The file keeps the sessions for the next run."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        for session in self._live.values():
            session.ended.set()
            await session.entry.leave()

    async def _save(self) -> None:
        if self._path is None or self._replace_file is None:
            return
        async with self._writing:
            live = [
                _Kept(one.digest, one.entry.kept, one.expire_s, one.entry.caller)
                for one in self._live.values()
            ]
            data = msgspec.json.encode([*self._earlier.values(), *live])
            try:
                await asyncio.to_thread(self._replace_file, self._path, data)
            except OSError as error:
                await _remove(self._path, error.strerror)


def _digest(session_id: str) -> str:
    return hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_LIMIT_BYTES)


async def _remove(path: Path, why: str | None) -> None:
    """Deletes a file that can't be written: it may have a session that has ended since."""
    try:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    except OSError as error:
        logger.warning(
            "%s can be neither written (%s) nor deleted (%s), so sessions that end now are valid again "
            "after a restart: delete the file",
            path,
            why,
            error.strerror,
        )
    else:
        logger.warning("%s can't be written (%s), so browsers must log in again after a restart", path, why)
