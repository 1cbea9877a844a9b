"""The unix socket of the local API: who connects is asked of the kernel, and told to gRPC's handlers.

gRPC keeps the sockets of its peers to itself. So connections are taken here, where SO_PEERCRED can be asked
(unix(7)), and passed on byte by byte to gRPC's own listener, each from a name by which a handler finds out
who is calling.
"""

import errno
import grp
import logging
import os
import pwd
import secrets
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import trio

from leasehold_worker.errors import StartError
from leasehold_worker.processes import ProcessIdentity, identify, user_name

logger = logging.getLogger(__name__)

MODE: Final = 0o660
CONNECTIONS_LIMIT: Final = 512
"""Connections at once; further ones wait to be taken."""

PATH_LIMIT: Final = 107
"""Bytes of a path in sockaddr_un (unix(7)), less the one that ends it."""

REMEDY: Final = "give the worker another place by `socket` in its settings"

CHUNK_BYTES: Final = 65_536
_CREDENTIALS: Final = struct.Struct("3i")
_SCHEME: Final = "unix-abstract:"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection.

    Attributes:
        identity: The process that connected.
        uid: Its effective user.
        user: Its name.
    """

    identity: ProcessIdentity
    uid: int
    user: str

    @property
    def is_trusted(self) -> bool:
        """Whether it is root, or the worker's own user."""
        return self.uid in (0, os.geteuid())


@final
class LocalSocket:
    """The socket. It is there, and nobody is let in, until :meth:`run`.

    Args:
        path: Where it is made.
        group: Name of the group that may connect besides the worker's user and root. Empty: the worker's own.

    Raises:
        StartError: It can't be made, and why.
    """

    def __init__(self, path: Path, group: str) -> None:
        self.path = path
        self._gid = _gid(group)
        self._peers: dict[str, Peer] = {}
        self.inner_name = f"leasehold-{secrets.token_hex(16)}"
        """Abstract name of gRPC's own listener, which answers only those that come through here."""
        self._socket = _listen(path, self._gid)

    def peer(self, grpc_peer: str) -> Peer | None:
        """Who a gRPC handler's peer is, by ``context.peer()``. None: it did not come through here."""
        return self._peers.get(grpc_peer.removeprefix(_SCHEME))

    @property
    def inner_address(self) -> str:
        """Where gRPC is to listen."""
        return f"{_SCHEME}{self.inner_name}"

    async def run(self) -> None:
        """Takes connections until cancelled. Then the socket is gone."""
        limit = trio.CapacityLimiter(CONNECTIONS_LIMIT)
        listener = trio.socket.from_stdlib_socket(self._socket)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await limit.acquire_on_behalf_of(token := object())
                    connection = await _accept(listener)
                    nursery.start_soon(self._pass_on, connection, limit, token)
        finally:
            self.path.unlink(missing_ok=True)  # while it is still ours: the next worker may come at once
            listener.close()

    def close(self) -> None:
        """Takes the socket away, unless that was done before."""
        if self._socket.fileno() >= 0:
            self.path.unlink(missing_ok=True)
            self._socket.close()

    async def _pass_on(
        self, connection: trio.socket.SocketType, limit: trio.CapacityLimiter, token: object
    ) -> None:
        name = f"leasehold-{secrets.token_hex(16)}"
        inner = trio.socket.socket(socket.AF_UNIX)
        try:
            peer = self._identify(connection)
            if peer is None:
                return
            self._peers[name] = peer
            await inner.bind(f"\0{name}")
            await inner.connect(f"\0{self.inner_name}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump, connection, inner, nursery.cancel_scope)
                nursery.start_soon(_pump, inner, connection, nursery.cancel_scope)
        except OSError as error:
            logger.warning("a local connection failed: %s", error)
        finally:
            # Forgotten before the name is free: whoever took it next would be taken for this peer.
            self._peers.pop(name, None)
            inner.close()
            connection.close()
            limit.release_on_behalf_of(token)

    def _identify(self, connection: trio.socket.SocketType) -> Peer | None:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(data)
        identity = identify(pid) if pid > 0 else None  # 0: it lives in a pid namespace that we can't see into
        if identity is None:
            logger.warning("a process that can't be seen from here (user %d) connected, and was refused", uid)
            return None
        if uid not in (0, os.geteuid()) and self._gid not in _groups(uid, gid):
            logger.warning("process %d of user %s may not connect, and was refused", pid, user_name(uid))
            return None
        return Peer(identity, uid, user_name(uid))


def _gid(group: str) -> int:
    if not group:
        return os.getegid()
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise StartError(
            f"socket_group {group!r} is no group of this host: create it, or name another"
        ) from None


def _groups(uid: int, gid: int) -> set[int]:
    try:
        return {gid, *os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)}
    except KeyError:
        return {gid}


def _listen(path: Path, gid: int) -> socket.socket:
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise StartError(
            f"the socket's path {path} has more than {PATH_LIMIT} bytes, the most that a unix socket takes: "
            f"give a shorter one: {REMEDY}"
        )
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        mask = os.umask(0o777)  # nobody gets in before the mode is right
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        if gid != os.getegid():
            os.chown(path, -1, gid)
        path.chmod(MODE)
        listener.listen(128)
    except StartError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise StartError(f"the socket {path} can't be made ({error.strerror}): {REMEDY}") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Removes a socket on which nobody listens.

    Raises:
        StartError: Somebody does, or it is no socket.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} is there and is no socket: {REMEDY}")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (BlockingIOError, TimeoutError):
            pass  # somebody does, and others wait to be let in
    raise StartError(f"another worker serves the socket {path}: {REMEDY}")


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    while True:
        try:
            connection, _ = await listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED):
                raise
            logger.warning("a local connection can't be taken for the moment: %s", error.strerror)
            await trio.sleep(1.0)
        else:
            return connection


async def _pump(
    source: trio.socket.SocketType, sink: trio.socket.SocketType, scope: trio.CancelScope
) -> None:
    """Passes bytes on until one side ends."""
    out = trio.SocketStream(sink)
    try:
        while data := await source.recv(CHUNK_BYTES):
            await out.send_all(data)
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    scope.cancel()
