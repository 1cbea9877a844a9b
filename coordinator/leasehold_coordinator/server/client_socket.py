"""The unix socket for clients of this host. The kernel identifies its peers, so they need no token.

gRPC does not expose the sockets of its peers. So connections are accepted here, where the kernel identifies
the peer (unix(7)), and are forwarded byte by byte to gRPC's own listener. Each has a name by which a call
finds its peer. The listener is in the state directory, and only the coordinator's user can connect to it.
"""

import asyncio
import errno
import hashlib
import logging
import os
import secrets
import socket
import stat
import struct
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, final
from urllib.parse import quote

from leasehold_coordinator.access.private_files import require_ours
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server.channel_options import scaled

logger = logging.getLogger(__name__)

MODE: Final = 0o666
"""Every user may connect, since the kernel tells who does. The directory decides who reaches the socket."""

CONNECTIONS_LIMIT: Final = 1_024
"""Connections at once. One user may have at most as many as are still free. Further ones are closed."""

OWN_RESERVE: Final = 64
"""Further connections for root and the coordinator's own user. One of the others may have many user ids."""

BACKLOG: Final = 256

CHUNK_BYTES: Final = 65_536
PATH_LIMIT_BYTES: Final = 107
"""Bytes of a path in sockaddr_un (unix(7)), without the final zero."""

_CREDENTIALS: Final = struct.Struct("3i")
_SCHEME: Final = "unix-abstract:"


@final
class ClientSocket:
    """The socket, from its creation to :meth:`close`.

    Args:
        path: Its path. A socket that a killed coordinator left there is replaced.
        directory: The state directory, for gRPC's own listener.

    Raises:
        StartError: The socket can't be created.
    """

    def __init__(self, path: Path, directory: Path) -> None:
        self.path = path
        name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]
        self._inner_path = directory.absolute() / f"{name}.grpc"  # one for each coordinator of the directory
        _require_short(self._inner_path, "--state-dir")
        self.sessions_path = self._inner_path.with_suffix(".web-sessions")
        """The file of the web page's sessions, one for each coordinator of the directory."""
        self._users: dict[str, int] = {}
        """The user of each forwarded connection, by the connection's name."""
        self._connections: set[asyncio.Task[None]] = set()
        self._counts: Counter[int] = Counter()
        """Number of connections of each user."""
        self._told: set[int] = set()
        """Users in the log because of their limit, until one of their connections has ended."""
        self._listener = _listen(path)
        self._inode = path.stat().st_ino
        self._accepting = asyncio.create_task(self._accept())

    @property
    def inner_address(self) -> str:
        """Address of gRPC's own listener."""
        return f"unix:{quote(str(self._inner_path))}"  # gRPC decodes it as a URI

    def user_id(self, grpc_peer: str) -> int | None:
        """The user behind a gRPC peer, by ``context.peer()``. None: the connection was not forwarded."""
        return self._users.get(grpc_peer.removeprefix(_SCHEME))

    async def close(self) -> None:
        """Ends all connections, and removes the socket."""
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        with suppress(OSError):  # such as a read-only disk: the next start replaces both
            self._inner_path.unlink(missing_ok=True)
            if self.path.stat().st_ino == self._inode:  # not the socket of a later coordinator
                self.path.unlink()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # such as EMFILE, which passes
                logger.warning("can't accept a connection on %s: %s", self.path, error.strerror)
                await asyncio.sleep(1)
                continue
            uid = _user_of(connection)
            reserve = OWN_RESERVE if uid in (0, os.geteuid()) else 0
            if self._counts[uid] >= scaled(CONNECTIONS_LIMIT) + reserve - len(self._connections):
                if uid not in self._told:
                    self._told.add(uid)
                    logger.warning(
                        "%s has %d connections of the Unix user %d and %d in all, which is the limit",
                        self.path,
                        self._counts[uid],
                        uid,
                        len(self._connections),
                    )
                connection.close()
                continue
            self._counts[uid] += 1
            task = loop.create_task(self._forward(connection, uid))
            self._connections.add(task)
            task.add_done_callback(partial(self._end, uid))

    def _end(self, uid: int, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._told.discard(uid)
        self._counts[uid] -= 1
        if not self._counts[uid]:
            del self._counts[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a connection on %s failed: %s", self.path, error)

    async def _forward(self, connection: socket.socket, uid: int) -> None:
        name = f"leasehold-{secrets.token_hex(16)}"
        with connection, socket.socket(socket.AF_UNIX) as inner:
            connection.setblocking(False)
            inner.setblocking(False)
            self._users[name] = uid
            try:
                inner.bind(f"\0{name}")
                await asyncio.get_running_loop().sock_connect(inner, str(self._inner_path))
                await _join(connection, inner)
            finally:
                # Removed before the address is free: its next user must not get the identity of this peer.
                del self._users[name]


def _user_of(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid


async def _join(one: socket.socket, other: socket.socket) -> None:
    """Passes bytes both ways until either side ends."""
    pumps = [asyncio.create_task(_pump(one, other)), asyncio.create_task(_pump(other, one))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):  # a side was reset, which ends the connection
        while data := await loop.sock_recv(source, CHUNK_BYTES):
            await loop.sock_sendall(sink, data)


def _require_short(path: Path, option: str) -> None:
    if len(os.fsencode(path)) > PATH_LIMIT_BYTES:
        raise StartError(
            f"the path of the socket {path} is longer than {PATH_LIMIT_BYTES} bytes: choose a shorter one "
            f"with {option}"
        )


def _listen(path: Path) -> socket.socket:
    _require_short(path, "--socket")
    try:
        require_ours(path.parent, "--socket")
        _remove_stale(path)
    except OSError as error:
        raise _unusable(path, error) from error
    listener = socket.socket(socket.AF_UNIX)
    try:
        mask = os.umask(0o777 & ~MODE)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _unusable(path, error) from error
    return listener


def _unusable(path: Path, error: OSError) -> StartError:
    return StartError(f"can't listen on the socket {path}: {error.strerror}; choose another with --socket")


def _remove_stale(path: Path) -> None:
    """Removes the socket of a coordinator that has ended.

    Raises:
        OSError: EADDRINUSE, a process listens there; EEXIST, the file is no socket.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "another file is there")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, "another process listens there")
