"""Identities of Unix users of the coordinator's host, by their user ids."""

import asyncio
import os
import pwd
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.identities import NAME, Identity, Kind
from leasehold_coordinator.errors import FleetError

LOOKUP_S: Final = 5.0
"""How long the lookup of a login name may take. A directory of users may be slow."""

AGE_LIMIT_S: Final = 60.0
"""How long a login name is remembered."""

CACHE_LIMIT: Final = 1_024
"""Most login names that are remembered."""

_STAND_IN: Final = re.compile(r"uid-\d+")


@final
class UnixUsers:
    """Looks up login names, each in a thread and once per minute."""

    def __init__(self) -> None:
        self._own = {uid: identity_of(uid) for uid in (0, os.geteuid())}
        """Identities of root and of the coordinator's user, looked up once."""
        self._known: dict[int, tuple[Identity, float]] = {}
        """Identities of others, with the times of their lookups, oldest first."""
        self._under_way: dict[int, asyncio.Future[Identity]] = {}
        """Lookups under way. However many calls a user makes, others wait for one lookup of that user."""
        self._threads = ThreadPoolExecutor(1, "unix-users")

    @property
    def own(self) -> Identity:
        """The identity of the coordinator's own user."""
        return self._own[os.geteuid()]

    def is_admin(self, uid: int) -> bool:
        """Whether a user could edit the store."""
        return uid in self._own

    async def identity(self, uid: int) -> Identity:
        """The identity of a user.

        Raises:
            FleetError: UNAUTHENTICATED, the login name could not be looked up in time.
        """
        if uid in self._own:
            return self._own[uid]
        known, time_s = self._known.get(uid, (None, 0.0))
        if known is not None and time.monotonic() - time_s < AGE_LIMIT_S:
            return known
        if uid not in self._under_way:
            loop = asyncio.get_running_loop()
            self._under_way[uid] = loop.run_in_executor(self._threads, identity_of, uid)
            self._under_way[uid].add_done_callback(lambda _: self._under_way.pop(uid, None))
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await asyncio.shield(self._under_way[uid])
        except (TimeoutError, OSError) as error:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNAUTHENTICATED,
                f"the login name of the Unix user {uid} can't be looked up: try again, or see `getent passwd "
                f"{uid}` on the coordinator's host",
            ) from error
        self._known.pop(uid, None)
        self._known[uid] = (found, time.monotonic())
        if len(self._known) > CACHE_LIMIT:
            del self._known[next(iter(self._known))]
        return found


def identity_of(uid: int) -> Identity:
    """The identity of a Unix user: its login name, or ``uid-NUMBER`` if it has none.

    A login name that is no name of an identity, or reads like the number of a user, counts as none.
    """
    try:
        login = pwd.getpwuid(uid).pw_name
    except KeyError:
        login = ""
    is_name = NAME.fullmatch(login) and not _STAND_IN.fullmatch(login)
    return Identity(Kind.LOCAL, login if is_name else f"uid-{uid}")
